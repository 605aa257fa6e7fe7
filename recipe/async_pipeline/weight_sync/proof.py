# SPDX-License-Identifier: Apache-2.0
"""Verification: a replica's served weights are compared with the published ones.

The trainer puts a few values of some tensors of each version into the manifest. The replica looks the
same values up in the parameters it *serves*, found by name without the loader, so a loader that skips,
misplaces or half-fills a tensor is caught. Positions follow from version and name. The tensors rotate, so
that all are covered in turn; the embeddings are checked every time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import xxhash

from ..errors import ProofError
from .manifest import VALUES_PER_TENSOR, Manifest, Sample

Positions = npt.NDArray[np.int64]
Held = npt.NDArray[np.bool_]
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
_EXPERT = re.compile(r"(?P<base>.*\.experts)\.(?P<index>\d+)\.(?P<part>gate_proj|up_proj|down_proj)\.weight")


def sampled_names(names: Sequence[str], publication: int, count: int) -> tuple[str, ...]:
    """Return the tensors to verify in this update: a rotating slice, plus embedding and head.

    `publication` counts updates one by one, unlike versions, some of which may be skipped.
    """
    if count >= len(names):
        return tuple(names)
    start = publication * count % len(names)
    rotating = {names[(start + i) % len(names)] for i in range(count)}
    return tuple(n for n in names if n in rotating or n.endswith((EMBEDDING, HEAD)))


def sample_positions(version: int, name: str, numel: int) -> Positions:
    """Return flat positions to compare, int64 of shape (min(numel, 64),); the same on both sides."""
    seed = xxhash.xxh3_64_intdigest(f"{version}/{name}".encode())
    count = min(numel, VALUES_PER_TENSOR)
    return np.random.default_rng(seed).integers(0, numel, size=count)


def draw_sample(version: int, name: str, tensor: torch.Tensor) -> Sample:
    """Take the trainer's sample of one tensor."""
    if tensor.numel() == 0:
        return Sample(name, b"")
    values = tensor.reshape(-1)[
        torch.from_numpy(sample_positions(version, name, tensor.numel())).to(tensor.device)
    ]
    return Sample(name, to_bytes(values))


def to_bytes(values: torch.Tensor) -> bytes:
    """Return the raw bytes of a one-dimensional tensor of any dtype."""
    return bytes(values.detach().cpu().contiguous().view(torch.uint8).numpy())


@dataclass(frozen=True)
class Placement:
    """Where the rows and columns of one published tensor are in a served parameter."""

    served: torch.Tensor
    """Shape (rows, columns); trailing dimensions are flattened."""
    row_shift: int
    """Served row of published row `rows.start`."""
    rows: range
    columns: range

    def lookup(self, positions: Positions, num_columns: int) -> tuple[Held, torch.Tensor]:
        """Return which positions this rank holds, and their served values on the CPU."""
        row, column = np.divmod(positions, num_columns)
        held = (
            (row >= self.rows.start) & (row < self.rows.stop)
            & (column >= self.columns.start) & (column < self.columns.stop)
        )  # fmt: skip
        row, column = row[held] - self.rows.start + self.row_shift, column[held] - self.columns.start
        device = self.served.device
        return held, self.served[torch.from_numpy(row).to(device), torch.from_numpy(column).to(device)].cpu()


class ServedModel:
    """The served parameters by published name, for one tensor-parallel rank."""

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        packed: Mapping[str, Sequence[str]],
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> None:
        """`packed` maps a fused module to its parts, e.g. qkv_proj: [q_proj, k_proj, v_proj]."""
        self._parameters = parameters
        self._packed = packed
        self._rank, self._size = tp_rank, tp_size

    def __contains__(self, name: str) -> bool:
        return name in self._parameters

    def place(self, name: str, shapes: Mapping[str, Sequence[int]]) -> Placement:
        """Find published tensor `name` among the served ones. Raises ProofError if it is missing."""
        rows, columns = _as_matrix(shapes[name])
        if name in self._parameters:
            served = self._matrix(name)
            return self._shard(name, served, rows, columns, served.shape[0], 0)

        for fused, parts in self._packed.items():
            module, _, leaf = name.rpartition(".")
            parent, _, part = module.rpartition(".")
            candidate = f"{parent}.{fused}.{leaf}" if parent else f"{fused}.{leaf}"
            if part in parts and candidate in self._parameters:
                sizes = [
                    _as_matrix(shapes[f"{parent}.{p}.{leaf}" if parent else f"{p}.{leaf}"])[0] for p in parts
                ]
                served = self._matrix(candidate)
                index = list(parts).index(part)
                held = self._fused_rows(candidate, served.shape[0], sizes)
                return self._shard(name, served, rows, columns, held[index], sum(held[:index]))

        expert = _EXPERT.fullmatch(name)
        if expert is not None:
            return self._place_expert(
                name, expert["base"], int(expert["index"]), expert["part"], rows, columns
            )
        raise ProofError(f"{name} was published but no served parameter holds it")

    def _place_expert(
        self, name: str, base: str, index: int, part: str, rows: int, columns: int
    ) -> Placement:
        """Find an expert in the engine's fused tensors of shape (experts, rows, columns), gate above up."""
        leaf = "w2_weight" if part == "down_proj" else "w13_weight"
        fused = next(
            (n for n in self._parameters if n.startswith(f"{base}.") and n.endswith(f".{leaf}")), None
        )
        if fused is None:
            raise ProofError(f"{name} was published but no served parameter holds it")
        experts = self._parameters[fused]
        if experts.dim() != 3 or index >= experts.shape[0]:
            raise ProofError(f"{name} was published but {fused} is served as {tuple(experts.shape)}")
        held = experts.shape[1] // 2 if part != "down_proj" else experts.shape[1]
        return self._shard(name, experts[index], rows, columns, held, held if part == "up_proj" else 0)

    def _matrix(self, name: str) -> torch.Tensor:
        served = self._parameters[name]
        if served.numel() == 0:
            raise ProofError(f"{name} has no served tensor to compare; the engine repacked it")
        return served.reshape(_as_matrix(served.shape))

    def _fused_rows(self, name: str, served_rows: int, sizes: Sequence[int]) -> list[int]:
        if served_rows == sum(sizes):
            return list(sizes)
        shards = [s // self._size for s in sizes]
        if sum(shards) != served_rows:
            raise ProofError(
                f"{name} has {served_rows} rows, which {self._size} ranks of {list(sizes)} cannot give"
            )
        return shards

    def _shard(
        self, name: str, served: torch.Tensor, rows: int, columns: int, held_rows: int, shift: int
    ) -> Placement:
        if served.shape[1] == columns and held_rows >= rows:
            return Placement(served, shift, range(rows), range(columns))
        if served.shape[1] == columns:
            start = self._rank * held_rows
            return Placement(served, shift, range(start, min(rows, start + held_rows)), range(columns))
        if served.shape[1] * self._size == columns and held_rows >= rows:
            start = self._rank * served.shape[1]
            return Placement(served, shift, range(rows), range(start, start + served.shape[1]))
        raise ProofError(f"{name} was published as {rows}x{columns} but is served as {tuple(served.shape)}")


def prove(manifest: Manifest, model: ServedModel) -> int:
    """Compare every sample of the manifest with the served values; return the number of tensors compared.

    Raises ProofError if a value differs, a tensor is not served, or nothing could be compared.
    """
    shapes = {e.name: e.shape for e in manifest.tensors}
    dtypes = {e.name: getattr(torch, e.dtype) for e in manifest.tensors}
    compared = 0
    for sample in manifest.samples:
        targets = [sample.name, *_aliases(sample.name, shapes, model)]
        for target in targets:
            if sample.name == target and target.endswith(HEAD) and target not in model:
                continue  # tied: the engine serves the embedding in its place, which is checked too
            _compare(manifest.version, sample, target, shapes, dtypes[sample.name], model)
            compared += 1
    if compared == 0:
        raise ProofError(f"v{manifest.version}: nothing could be compared, so the version is not verified")
    return compared


def scaled(manifest: Manifest, part: str, factor: float, dtype: torch.dtype) -> Manifest:
    """Return the manifest for an engine that multiplies tensors whose name contains `part` by a factor."""
    dtypes = {e.name: getattr(torch, e.dtype) for e in manifest.tensors}

    def as_served(sample: Sample) -> Sample:
        if part not in sample.name or factor == 1:
            return sample
        values = torch.frombuffer(bytearray(sample.values), dtype=dtypes[sample.name]).to(dtype) * factor
        return Sample(sample.name, to_bytes(values))

    tensors = tuple(
        msgspec.structs.replace(e, dtype=str(dtype).removeprefix("torch."))
        if part in e.name and factor != 1
        else e
        for e in manifest.tensors
    )
    return msgspec.structs.replace(manifest, tensors=tensors, samples=tuple(map(as_served, manifest.samples)))


def _compare(
    version: int,
    sample: Sample,
    target: str,
    shapes: Mapping[str, Sequence[int]],
    dtype: torch.dtype,
    model: ServedModel,
) -> None:
    shape = shapes[sample.name]
    if math.prod(shape) == 0:
        return
    positions = sample_positions(version, sample.name, math.prod(shape))
    known = shapes if target in shapes else {**shapes, target: shape}
    held, served = model.place(target, known).lookup(positions, _as_matrix(shape)[1])
    wanted = torch.frombuffer(bytearray(sample.values), dtype=dtype)[torch.from_numpy(held)].to(served.dtype)
    if not torch.equal(wanted.view(torch.uint8), served.contiguous().view(torch.uint8)):
        wrong = int((wanted != served).sum())
        raise ProofError(
            f"v{version}: {target} is served with values other than the published ones "
            f"({wrong} of {len(wanted)} sampled values differ); the load did not take"
        )


def _aliases(name: str, shapes: Mapping[str, Sequence[int]], model: ServedModel) -> list[str]:
    """With tied embeddings the head is not published, but it must equal the embedding."""
    if not name.endswith(EMBEDDING):
        return []
    head = HEAD
    return [head] if head not in shapes and head in model else []


def _as_matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Return rows and columns; a vector is a matrix of one column."""
    return int(shape[0]) if len(shape) else 1, math.prod(shape[1:])
