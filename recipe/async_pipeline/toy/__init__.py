# SPDX-License-Identifier: Apache-2.0
"""A real task that learns on two CPU cores: addition, made from a seed.

    task ──► data ──► train.parquet, val.parquet ─┐
      │                                           ├─► build: one cached directory ─► command
      └────► warmup ─► model + tokenizer ─────────┘
    reward: the rule that verl loads by path

`task` is pure arithmetic, `tokenizer` spells text as bytes, `model` is an empty Qwen2, `warmup`
teaches it a little by supervision, `data` writes verl's columns, `reward` scores one answer,
`build` puts all of it into one directory that is finished or absent, and `command` is
`async-pipeline task make`. Only `model`, `tokenizer`, `warmup` and `data` need the heavy libraries,
and they import them when called.
"""
