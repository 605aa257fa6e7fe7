# SPDX-License-Identifier: Apache-2.0
"""A random stream for each sample, so that an image does not depend on its neighbours in a batch.

Streams are drawn on the CPU: an accelerator would give other numbers for the same seed.
"""

from __future__ import annotations

import hashlib

import torch


def seed_of(*parts: int | str) -> int:
    """Return a seed of 63 bits that follows from the parts, such as the run's seed, a prompt and an index."""
    text = "\0".join(f"{type(part).__name__}:{part}" for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def stream(*parts: int | str) -> torch.Generator:
    """Return the generator of the parts."""
    return torch.Generator().manual_seed(seed_of(*parts))
