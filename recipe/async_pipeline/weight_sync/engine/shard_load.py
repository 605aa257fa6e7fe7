# SPDX-License-Identifier: Apache-2.0
"""Copy a published version into a sharded model, block by block, and verify it.

A consumer with the trainer's own kind of model (a pool for log-probs, a refreshed reference) holds the
same tensors under the same names, sharded in its own way. Each of its ranks copies the blocks that it
holds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ...errors import ProofError, WeightSyncError
from ..memory.arena import HeldBlock
from ..memory.manifest import Manifest
from ..memory.memory_work import copy_all
from ..proof.proof import sample_positions, to_bytes

SCALING = ("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern")
"""Settings of an adapter that change what its tensors mean; their names say where they belong."""


class RankLoad(NamedTuple):
    """What one rank did. A version is proved if its ranks together compared at least one tensor."""

    version: int
    compared: int
    """Number of sampled tensors of which this rank holds a sampled element."""


def require_same_adapter(manifest: Manifest, held: str | None) -> None:
    """Compare what was published, weights or an adapter, with what this model has; see `Manifest.adapter`.

    Raises WeightSyncError if they are of different kinds, or adapters that are scaled differently.
    """
    published = manifest.adapter
    if published is None or held is None:
        if published != held:
            kinds = ("a LoRA adapter", "whole weights")
            was, has = kinds if held is None else reversed(kinds)
            raise WeightSyncError(f"v{manifest.version} is of {was}, but this model takes {has}")
        return
    theirs, ours = json.loads(published), json.loads(held)
    for name in SCALING:
        if theirs.get(name) != ours.get(name):
            raise WeightSyncError(
                f"v{manifest.version} is of an adapter with {name}={theirs.get(name)!r}, this model has one "
                f"with {ours.get(name)!r}"
            )


def load_parts(version: int, published: Mapping[str, torch.Tensor], parts: Sequence[HeldBlock]) -> None:
    """Copy each part's block out of its published tensor, cast to the part's dtype. Waits for device
    copies.

    Raises WeightSyncError, before anything is written, if the two sides do not have the same tensors.
    """
    wanted = {part.name: part.shape for part in parts}
    if odd := wanted.keys() ^ published.keys():
        names = ", ".join(sorted(odd)[:3])
        raise WeightSyncError(f"v{version} and this model differ in {len(odd)} tensors, e.g. {names}")
    for name, shape in wanted.items():
        if tuple(published[name].shape) != shape:
            raise WeightSyncError(
                f"v{version}: {name} has the shape {tuple(published[name].shape)}, here {shape}"
            )
    held = [part for part in parts if part.values is not None and part.values.numel()]
    targets = [part.values.detach() for part in held if part.values is not None]
    if targets:
        sources = [
            published[part.name][part.slices].view(target.shape)
            for part, target in zip(held, targets, strict=True)
        ]
        if targets[0].is_cuda:
            with torch.no_grad():
                torch._foreach_copy_(targets, sources, non_blocking=True)
            torch.cuda.synchronize(targets[0].device)
        else:
            copy_all(targets, sources)


def prove_parts(manifest: Manifest, parts: Sequence[HeldBlock]) -> int:
    """Compare this rank's share of the samples of a version; return the number of tensors compared.

    A tensor without elements counts if this rank has it. Raises ProofError if they differ.
    """
    entries = {entry.name: entry for entry in manifest.tensors}
    held: dict[str, list[HeldBlock]] = {}
    for part in parts:
        if part.values is not None and part.values.numel():
            held.setdefault(part.name, []).append(part)

    compared = 0
    for sample in manifest.samples:
        entry = entries[sample.name]
        dtype = getattr(torch, entry.dtype)
        numel = int(np.prod(entry.shape, dtype=np.int64))
        if numel == 0:
            compared += any(part.name == entry.name and part.values is not None for part in parts)
            continue
        positions = np.stack(
            np.unravel_index(sample_positions(manifest.version, entry.name, numel), entry.shape or (1,))
        )

        drawn = torch.frombuffer(bytearray(sample.values), dtype=torch.uint8).view(-1, dtype.itemsize)
        for part in held.get(entry.name, ()):
            assert part.values is not None
            values = part.values.detach().reshape(part.extent or (1,))
            first = np.array(part.offset or (0,)).reshape(-1, 1)
            inside = (positions >= first) & (positions < first + np.array(values.shape).reshape(-1, 1))

            mine = inside.all(axis=0)
            if not mine.any():
                continue

            where = tuple(torch.from_numpy(axis).to(values.device) for axis in positions[:, mine] - first)
            found = values[where].to(dtype)
            if to_bytes(found) != bytes(drawn[torch.from_numpy(mine)].numpy()):
                raise ProofError(f"v{manifest.version}: {entry.name} differs from the published values")
            compared += 1
    return compared
