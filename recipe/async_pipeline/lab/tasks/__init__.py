# SPDX-License-Identifier: Apache-2.0
"""Real tasks that two CPU cores learn, made from a seed: addition, FrozenLake, sums with a tool, and images.

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

    lake         the boards of FrozenLake, and their teacher; lake_warmup and lake_build as above
    calculator   sums of two lengths and a tool that costs; calculator_* as above
    image        squares of a colour in a quarter; image_model makes a pipeline of diffusers, image_* as above

`async-pipeline task make` is the command. Only `model`, `tokenizer`, `warmup` and `data` need the heavy
libraries, and they import them when called.
"""
