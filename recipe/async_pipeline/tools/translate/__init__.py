# SPDX-License-Identifier: Apache-2.0
"""Translate whole configuration files of other systems into overrides for verl with this package.

    rules        the walk over a file, by the rules of `config.foreign_keys`
    roll         ROLL's keys, of its RLVR and its agentic pipeline
    roll_run     keys of ROLL whose meaning depends on few others
    rllm         rLLM's keys that verl does not have
    uni_agent    uni-agent's keys that verl does not have

`async-pipeline translate` is the command. Keys that may be written into verl's config as they are, such as
`async_generation_ratio`, are in `config.aliases`.
"""
