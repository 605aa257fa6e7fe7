# SPDX-License-Identifier: Apache-2.0
"""The way of a weight version from the trainer to the replicas: gather, transfer, load, verify.

    memory/manifest.py           the contents of a version: tensors, buckets, checksums, samples
    memory/segment.py            a piece of shared host memory
    memory/segment_names.py      names of such pieces, and the sweep of orphans
    memory/arena.py              the memory that training ranks write, allocated and touched once, then reused
    memory/board.py              where a version is announced once its checksums are known
    memory/dual_buffer.py        which of two slots may be filled (pure)
    hosts/receiver.py            buckets from another host
    engine/copy_plan.py          the copies of an engine's loader, repeated without it
    engine/standby.py            a version that is staged on the device during generation, copied or converted
    engine/shard_load.py         a version into a sharded model of the trainer's kind
    engine/engine_adapter.py     what an engine has to offer: prepare, commit, and which element is which
    engine/recording_adapter.py  the same for engines whose loader can be recorded
    engine/serving_rank.py       one rank that stages, commits and verifies versions through its adapter
    proof/provenance.py          published elements in the intermediate tensors of a load
    proof/element_map.py         which published element each served element is
    proof/map_check.py           nothing is left out, and everything is where the engine expects it
    proof/proof.py               the comparison of served and published values
    engine/versioned_engine.py   which version wrote which token
    fleet/registry.py            the states and versions of all consumers, and what follows from them (pure)
    fleet/preparation.py         what a consumer has to do, and what it has prepared
    fleet/keeper.py              keeps one consumer at the newest version, and restarts it after a failure
    fleet/fleet.py               each version to all consumers; consumers that join and leave

Imports torch, but neither verl nor ray nor vllm.
"""
