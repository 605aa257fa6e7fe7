# SPDX-License-Identifier: Apache-2.0
"""What a rollout engine offers so that versions can be loaded into it and verified.

An `EngineAdapter` is one rank of an engine, inside the engine's worker process. It converts and stages a
version next to generation (`prepare`), makes it the serving one between two engine steps (`commit`), and
describes what it then serves (`Delivered`): the tensors, the learned map of their elements, and what the
engine's own tables say about that map. It never judges its own load: `proof.Prover` does.

`recording_adapter.RecordingAdapter` implements most of it for engines that load through Python code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from ..memory.manifest import Manifest, TensorEntry
from ..proof.element_map import ElementMap, Piece, View

Conversion = Callable[[torch.Tensor], torch.Tensor]
"""From published values to the served ones, element by element; deterministic."""


class Expected(NamedTuple):
    """Where the engine's own tables place a published tensor on this rank."""

    pieces: tuple[Piece, ...]
    """Empty if this rank holds no element of it; other ranks of the replica must."""
    absent: str | None = None
    """Set if no rank of the replica serves the tensor: the reason."""


class Computed(NamedTuple):
    """Served tensors that the engine computes from published ones, such as quantized weights and scales."""

    sources: Mapping[str, tuple[View, ...]]
    """The elements that this rank uses, by published tensor."""
    served: tuple[str, ...]
    """Tensors that hold the result, all of whose elements follow from the sources."""
    compute: Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]
    """Repeats the computation without the engine's loader: whole published tensors in, served ones out."""


@dataclass(frozen=True)
class Delivered:
    """What one rank serves after a commit."""

    tensors: Mapping[str, torch.Tensor]
    """Every parameter and loaded buffer, by the engine's names. Aliases are listed under each name."""
    elements: ElementMap
    """Learned from the load itself. The same object for each load of the same layout."""
    expected: Callable[[TensorEntry], Expected | None]
    """Derived without the load, from the engine's tables of names and shards. None if they do not say; the
    proof then relies on order and coverage.
    """
    converted: Mapping[str, Conversion] = field(default_factory=dict)
    """Conversions of elements, by served tensor. Without one, served and published dtype must be equal."""
    computed: Sequence[Computed] = ()


class EngineAdapter(Protocol):
    """One rank of an engine. Called between two steps of the engine, except for `prepare`."""

    device: torch.device
    """Where the served tensors are."""

    def prepare(self, manifest: Manifest, ended: Callable[[BaseException | None], None] = ...) -> bool:
        """Start to map, convert and stage a version while the engine generates.

        Returns False if the engine cannot; `commit` then does the whole load. Otherwise it calls `ended` with
        the error or None when the version is staged, from any thread. Replaces an older version that is
        staged or being staged, without waiting for it. If the version's memory changes before `commit`
        returned, the version must not be committed.
        """

    def staged_version(self) -> int | None:
        """Return the version that `commit` only has to switch to, or None. Raises an error of the staging."""

    def commit(self, manifest: Manifest, piece_bytes: int) -> Delivered:
        """Make a version the serving one, staged or not, and describe what is served.

        A load from host memory handles at most `piece_bytes` at a time. Raises WeightSyncError or
        ProofError; the engine then serves an undefined mixture and must restart.
        """

    def published(self, manifest: Manifest) -> Mapping[str, torch.Tensor]:
        """Return the version's tensors by published name, in host memory."""

    def seal(self) -> None:
        """Do what the engine does with weights once they are proved, e.g. pack them for its kernels."""
