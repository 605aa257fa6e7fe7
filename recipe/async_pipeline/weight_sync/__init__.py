# SPDX-License-Identifier: Apache-2.0
"""The way of a weight version from the trainer to the replicas: gather, transfer, load, verify.

    manifest.py          the contents of a version: tensors, buckets, checksums, samples
    segment.py           a piece of shared host memory
    segment_names.py     names of such pieces, and the sweep of orphans
    arena.py             the memory that training ranks write, allocated and touched once, then reused
    board.py             where a version is announced once its checksums are known
    dual_buffer.py       which of two slots may be filled (pure)
    receiver.py          buckets from another host
    copy_plan.py         the copies of an engine's loader, repeated without it
    standby_version.py   a version that is staged on the device during generation
    standby_copy.py      ... as a second copy of what is served
    standby_conversion.py ... converted, for an engine that computes its weights
    shard_load.py        a version into a sharded model of the trainer's kind
    engine_adapter.py    what an engine has to offer: prepare, commit, and which element is which
    recording_adapter.py the same for engines whose loader can be recorded
    provenance.py        published elements in the intermediate tensors of a load
    element_map.py       which published element each served element is
    map_check.py         nothing is left out, and everything is where the engine expects it
    proof.py             the comparison of served and published values
    versioned_engine.py  which version wrote which token
    busy_time.py         seconds with open requests
    registry.py          the states and versions of all consumers, and what follows from them (pure)
    consumer.py          what a consumer has to do
    keeper.py            keeps one consumer at the newest version, and restarts it after a failure
    fleet.py             each version to all consumers; consumers that join and leave

Imports torch, but neither verl nor ray nor vllm.
"""
