# SPDX-License-Identifier: Apache-2.0
"""Weight versions on their way from the trainer to the replicas: gather → send/recv → load → proof.

    manifest.py     what a version consists of: tensors, buckets, checksums, samples for the proof
    dual_buffer.py  which of the two arenas may be filled (pure)
    arena.py        shared host memory, allocated and touched once, then reused
    delivery.py     is what a replica serves what the trainer published?

Imports torch, but neither verl nor ray nor vllm.
"""
