# SPDX-License-Identifier: Apache-2.0
"""Weight versions on their way from the trainer to the replicas: gather → send/recv → load → proof.

    manifest.py          what a version consists of: tensors, buckets, checksums, samples for the proof
    segment.py           a piece of shared host memory
    arena.py             what training ranks write, allocated and touched once, then reused
    board.py             where a version is announced when its checksums are known
    dual_buffer.py       which of two slots may be filled (pure)
    inbox.py             what arrives from another host
    recorded_load.py     the copies that an engine's loader makes, made again without it
    spare.py             a second copy on the device, filled beside generation
    delivery.py          is what a replica serves what the trainer published?
    versioned_engine.py  which version wrote which token
    distribution.py      each version to all replicas; what becomes of one that fails

Imports torch, but neither verl nor ray nor vllm.
"""
