# SPDX-License-Identifier: Apache-2.0
"""Verification: a replica's served weights are compared with the published ones.

The trainer puts a few values of some tensors of each version into the manifest. The replica looks the
same values up in the tensors it *serves*, through the map of elements that was learned from its load and
checked against the engine's own tables (`map_check.py`). Values are compared bit for bit in the published
dtype. Positions follow from version and name. The tensors rotate, so that all are covered in turn; the
embeddings are checked every time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import xxhash

from ...core.groups.items import LoadReport
from ...errors import ProofError
from ..engine.copy_plan import view_of
from ..engine.engine_adapter import Computed, Delivered
from ..memory.manifest import VALUES_PER_TENSOR, Manifest, Sample, TensorEntry
from .element_map import ElementMap, Piece, Positions, View
from .map_check import CheckedMap, Coverage, RankShare, check_map, check_union

# SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014). Replicas pause
# for these positions, and NumPy's generators take longer to set up than to draw 64 values.
_STEPS = np.arange(1, VALUES_PER_TENSOR + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
_MIX = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
)

ROTATION = 64
"""Updates in which all tensors are verified, however many there are, as in a mixture of experts."""
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


def sampled_names(names: Sequence[str], publication: int, count: int) -> tuple[str, ...]:
    """Return the tensors to verify in this update: a rotating slice, plus embedding and head.

    The slice has `count` tensors, or more if `ROTATION` updates would not cover all of them. `publication`
    counts updates one by one, unlike versions, some of which may be skipped.
    """
    count = max(count, -(-len(names) // ROTATION))
    if count >= len(names):
        return tuple(names)
    start = publication * count % len(names)
    rotating = {names[(start + i) % len(names)] for i in range(count)}
    return tuple(n for n in names if n in rotating or n.endswith((EMBEDDING, HEAD)))


def sample_positions(version: int, name: str, numel: int) -> Positions:
    """Return flat positions to compare, int64 of shape (min(numel, 64),); the same on both sides."""
    seed = xxhash.xxh3_64_intdigest(f"{version}/{name}".encode())
    mixed = np.uint64(seed) + _STEPS[: min(numel, VALUES_PER_TENSOR)]
    for shift, factor in _MIX:
        mixed ^= mixed >> shift
        mixed *= factor
    mixed ^= mixed >> np.uint64(31)
    positions: Positions = (mixed % np.uint64(numel)).astype(np.int64)
    return positions


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
class Proved:
    """What one rank proved of a version."""

    tensors: int
    """Number of sampled tensors of which this rank holds a sampled element."""
    share: RankShare | None
    """The rank's share, if its map is new and the ranks must be checked together; see `check_union`."""
    coverage: Coverage

    def report(self, load_s: float, prove_s: float) -> LoadReport:
        """Return what the rank reports of a load that stalled it meanwhile."""
        return LoadReport(
            load_s=load_s,
            stall_s=load_s + prove_s,
            prove_s=prove_s,
            tensors_proved=self.tensors,
            elements_served=self.coverage.served,
            elements_explained=self.coverage.explained,
            unexplained=", ".join(self.coverage.unexplained),
        )


class _Layout(NamedTuple):
    """All that a check of a map depends on."""

    published: tuple[TensorEntry, ...]
    served: dict[str, tuple[torch.dtype, View]]
    elements: ElementMap
    converted: frozenset[str]
    computed: int

    @classmethod
    def of(cls, manifest: Manifest, delivered: Delivered) -> _Layout:
        served = {name: (tensor.dtype, view_of(tensor)) for name, tensor in delivered.tensors.items()}
        converted = frozenset(delivered.converted)
        return cls(manifest.tensors, served, delivered.elements, converted, len(delivered.computed))


class Prover:
    """Proves the versions of one rank; remembers the map that it has checked."""

    def __init__(self, ranks: int = 1) -> None:
        """`ranks`: the number of ranks that hold the published tensors together."""
        self._ranks = ranks
        self._known: _Layout | None = None
        self._checked: CheckedMap | None = None

    def prove(
        self, manifest: Manifest, delivered: Delivered, published: Callable[[], Mapping[str, torch.Tensor]]
    ) -> Proved:
        """Check the map, if it is new, and compare every sample of the manifest with the served values.

        Raises ProofError if a value differs, a tensor of either side is left out or in the wrong place, or
        nothing could be compared.
        """
        share, layout = None, _Layout.of(manifest, delivered)
        if self._checked is None or layout != self._known:
            self._checked = None  # stays so if the check fails
            checked = check_map(manifest, delivered)
            if self._ranks == 1:
                check_union(manifest.version, [checked.share])
            else:
                share = checked.share
            self._checked, self._known = checked, layout
        proved = _compare_samples(manifest, delivered, self._checked, published)
        return Proved(proved, share, self._checked.coverage)


def _compare_samples(
    manifest: Manifest,
    delivered: Delivered,
    checked: CheckedMap,
    published: Callable[[], Mapping[str, torch.Tensor]],
) -> int:
    entries = {entry.name: entry for entry in manifest.tensors}
    compared, proved_computed = 0, set()
    for sample in manifest.samples:
        entry = entries[sample.name]
        computed = checked.computed.get(sample.name)
        if computed is not None:
            if id(computed) not in proved_computed:
                _compare_computed(manifest.version, computed, delivered, published())
            proved_computed.add(id(computed))
            compared += 1
        elif math.prod(entry.shape) == 0:
            compared += 1
        else:
            pieces = checked.pieces[sample.name]
            compared += _compare_sample(manifest.version, entry, sample, pieces, delivered)
    if not compared:
        raise ProofError(f"v{manifest.version}: nothing could be compared")
    return compared


def _compare_sample(
    version: int, entry: TensorEntry, sample: Sample, pieces: Sequence[Piece], delivered: Delivered
) -> bool:
    """Compare one sample in all places that have some of its elements; return whether there is one."""
    positions = sample_positions(version, entry.name, math.prod(entry.shape))
    drawn = torch.frombuffer(bytearray(sample.values), dtype=getattr(torch, entry.dtype))
    found = False
    for piece in pieces:
        held, places = piece.places(positions)
        if not held.any():
            continue
        found = True
        wanted = drawn[torch.from_numpy(held)]
        conversion = delivered.converted.get(piece.served)
        served = values_at(delivered.tensors[piece.served], places)
        _require_equal(version, entry.name, wanted if conversion is None else conversion(wanted), served)
    return found


def _compare_computed(
    version: int, computed: Computed, delivered: Delivered, published: Mapping[str, torch.Tensor]
) -> None:
    """Repeat a computation from the published tensors and compare all of its results."""
    wanted = computed.compute({name: published[name] for name in computed.sources})
    for name in computed.served:
        _require_equal(version, name, wanted[name].cpu(), delivered.tensors[name].detach().cpu())


def _require_equal(version: int, name: str, wanted: torch.Tensor, served: torch.Tensor) -> None:
    same_kind = wanted.dtype == served.dtype and wanted.shape == served.shape
    if not same_kind:
        raise ProofError(
            f"v{version}: {name} is served as {served.dtype} {tuple(served.shape)} instead of "
            f"{wanted.dtype} {tuple(wanted.shape)}"
        )
    if to_bytes(wanted.flatten()) != to_bytes(served.flatten()):
        wrong = int((wanted != served).sum())
        raise ProofError(
            f"v{version}: {name} is served with values other than the published ones "
            f"({wrong} of {wanted.numel()} compared values differ); the load did not take"
        )


def values_at(tensor: torch.Tensor, places: Positions) -> torch.Tensor:
    """Return the elements at positions in memory, counted from the tensor's first one, on the CPU."""
    start = tensor.storage_offset()
    length = tensor.untyped_storage().nbytes() // tensor.element_size() - start
    flat = tensor.detach().as_strided((length,), (1,), start)
    return flat[torch.from_numpy(places).to(tensor.device)].cpu()
