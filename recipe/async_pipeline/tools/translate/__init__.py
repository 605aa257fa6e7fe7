# SPDX-License-Identifier: Apache-2.0
"""Translate whole configuration files of other systems into overrides for verl with this package.

    composition    a file as its own launcher composes it, with overrides
    rules          the walk over its keys, by the rules of `config.keys.foreign_keys`
    roll           ROLL's keys, of its RLVR and its agentic pipeline
    roll_run       keys of ROLL whose meaning depends on few others
    roll_workers   keys of ROLL's data, rewards, validation, engines and other pipelines
    verls_keys     verl's own keys, in the files of systems that are built on it
    rllm           rLLM's keys that verl does not have
    uni_agent      uni-agent's keys that verl does not have
    async_flow     AsyncFlow's keys that verl does not have

`async-pipeline translate` is the command. Keys that may be written into verl's config as they are, such as
`async_generation_ratio`, are in `config.keys.aliases`.
"""
