# SPDX-License-Identifier: Apache-2.0
"""A real task that two CPU cores can learn: addition, generated from a seed.

    task ──► data ──► train.parquet, val.parquet ─┐
      │                                           ├─► build: one cached directory
      └────► warmup ─► model + tokenizer ─────────┘
    reward: the rule that verl loads by path

    task         the arithmetic; pure
    tokenizer    spells text as bytes
    model        a Qwen2 with random weights
    warmup       teaches it a little by supervision
    data         writes verl's columns
    reward       scores one response
    build        collects everything in one directory that is complete or absent

`async-pipeline task make` is the command. Only `model`, `tokenizer`, `warmup` and `data` need the heavy
libraries, and they import them when called.
"""
