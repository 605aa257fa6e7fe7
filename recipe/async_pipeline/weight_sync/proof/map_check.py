# SPDX-License-Identifier: Apache-2.0
"""Check a learned map of elements: nothing is left out, and everything is where the engine expects it.

A map that was learned from a load proves nothing about the load itself: a loader that swaps two tensors
is recorded as it is. So the map must agree with an independent source. For tensors that the engine's own
tables of names and shards explain, both maps must be equal. For others, order and coverage must hold:
layers and experts arrive in their order, ranks hold their shares in the order of the ranks, no element
is served twice, and no element of either side is left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ...errors import ProofError
from ..engine.copy_plan import ServedMemory, view_of
from ..engine.engine_adapter import Computed, Delivered, Expected
from ..memory.manifest import Manifest, TensorEntry
from .element_map import ElementMap, Piece, Positions, View, missing_element, overlap

RankShare = dict[str, tuple[int, list[tuple[int, tuple[int, ...], tuple[int, ...]]]]]
"""What one rank holds: the number of elements of each published tensor, and the rank's views of it as plain
values, which pass between processes. Without tensors that the whole replica does not serve.
"""
MOST_NAMED = 3
"""Unexplained tensors that a report names."""
_NUMBER = re.compile(r"\d+")


class Coverage(NamedTuple):
    """How much of what one rank serves has a place that the engine's tables confirm."""

    served: int
    """Elements that were loaded, or computed from loaded ones."""
    explained: int
    """Those whose tensors the tables explain."""
    tensors: int
    """Number of published tensors that the tables explain."""
    unexplained: tuple[str, ...]
    """The first published tensors that they do not explain, the largest ones first."""


@dataclass(frozen=True)
class CheckedMap:
    """A map that was checked."""

    pieces: Mapping[str, tuple[Piece, ...]]
    """The pieces of each published tensor, including aliases."""
    computed: Mapping[str, Computed]
    """By published tensor."""
    share: RankShare
    coverage: Coverage


def check_map(manifest: Manifest, delivered: Delivered) -> CheckedMap:
    """Check the map of one rank. Raises ProofError, which names a tensor."""
    return _Check(manifest, delivered).run()


def check_union(version: int, shares: Sequence[RankShare]) -> None:
    """Check that the ranks of a replica together hold every published element, in the order of the ranks.

    Raises ProofError, which names a tensor.
    """
    for name in dict.fromkeys(name for share in shares for name in share):
        of_ranks = [[View(*plain) for plain in share.get(name, (0, []))[1]] for share in shares]
        numel = next(share[name][0] for share in shares if name in share)
        lost = missing_element([view for views in of_ranks for view in views], View.whole((numel,)))
        if lost is not None:
            raise ProofError(
                f"v{version}: {name} was published, but no rank of the replica serves its element {lost}"
            )
        starts = [min(view.offset for view in views) for views in of_ranks if views]
        if starts != sorted(starts):
            raise ProofError(
                f"v{version}: {name} is not in the order of the ranks; they hold it from {starts}"
            )


class _Check:
    def __init__(self, manifest: Manifest, delivered: Delivered) -> None:
        self._manifest, self._delivered = manifest, delivered
        self._learned: ElementMap = delivered.elements
        self._memory = ServedMemory(delivered.tensors)
        self._computed = {name: one for one in delivered.computed for name in one.sources}
        self._layout = {entry.name: entry for entry in manifest.tensors}
        self._pieces: dict[str, tuple[Piece, ...]] = {}
        self._absent: set[str] = set()
        self._expected: set[str] = set()

    def run(self) -> CheckedMap:
        for name in self._learned.pieces.keys() - self._layout.keys():
            raise self._error(f"{name} was loaded, but it was not published")
        for entry in self._manifest.tensors:
            self._place(entry)
        self._check_order()
        self._check_served()
        return CheckedMap(self._pieces, self._computed, self._share(), self._coverage())

    def _error(self, message: str) -> ProofError:
        return ProofError(f"v{self._manifest.version}: {message}")

    def _place(self, entry: TensorEntry) -> None:
        """Find the pieces of one published tensor, and compare them with the expected ones."""
        name = entry.name
        if name in self._computed or not math.prod(entry.shape):
            return
        learned = self._learned.pieces.get(name, ())
        expected = self._delivered.expected(entry)
        if expected is not None:
            learned = self._compare(name, learned, self._canonical(expected))
        self._check_pieces(entry, learned)
        self._pieces[name] = learned

    def _canonical(self, expected: Expected) -> Expected:
        tensors = self._delivered.tensors
        pieces = []
        for piece in expected.pieces:
            if piece.served not in tensors:
                raise self._error(f"{piece.served} is not served, but the engine's tables name it")
            served = self._memory.canonical(tensors[piece.served])
            if served is None:
                raise self._error(f"{piece.served} has no served tensor to compare; the engine repacked it")
            pieces.append(piece._replace(served=served))
        return expected._replace(pieces=tuple(pieces))

    def _compare(self, name: str, learned: tuple[Piece, ...], expected: Expected) -> tuple[Piece, ...]:
        """Require that a tensor was loaded as expected, and return where it is."""
        self._expected.add(name)
        if expected.absent is not None:
            self._absent.add(name)
        if not learned and expected.pieces and self._is_alias(name, expected.pieces):
            return expected.pieces
        if not learned and expected.pieces:
            raise self._error(f"{name} was published, but the engine did not load it")
        if learned and not expected.pieces:
            why = expected.absent or "it belongs to another rank"
            raise self._error(f"{name} is served in {learned[0].served}, but should not be: {why}")

        if learned == expected.pieces:
            return learned
        sizes = [sum(piece.source.numel for piece in pieces) for pieces in (learned, expected.pieces)]
        corners = [piece.source.corners() for piece in (*learned, *expected.pieces)]
        positions = np.unique(np.concatenate(corners)) if corners else np.empty(0, dtype=np.int64)
        found, wanted = (_places(pieces, positions) for pieces in (learned, expected.pieces))
        if found != wanted or sizes[0] != sizes[1]:
            if found == wanted:
                raise self._error(
                    f"{name} is in the wrong place: the engine loaded {sizes[0]} of its elements here, "
                    f"and its tables say {sizes[1]}"
                )
            position = min((p for p, _, _ in found ^ wanted))
            raise self._error(
                f"{name} is in the wrong place: its element {position} is served as {_at(found, position)}, "
                f"the engine's tables say {_at(wanted, position)}"
            )
        return learned

    def _is_alias(self, name: str, expected: tuple[Piece, ...]) -> bool:
        """Whether another published tensor was loaded into the memory where this one belongs."""
        targets = self._learned.targets()
        return all(
            any(other != name for other, _ in targets.get(piece.served, ()))
            and missing_element([view for _, view in targets[piece.served]], piece.target) is None
            for piece in expected
        )

    def _check_pieces(self, entry: TensorEntry, pieces: tuple[Piece, ...]) -> None:
        for piece in pieces:
            dtype = self._delivered.tensors[piece.served].dtype
            if not piece.source.one_to_one:
                raise self._error(
                    f"{entry.name} is repeated in {piece.served}; the engine adapter must declare how"
                )
            if dtype != getattr(torch, entry.dtype) and piece.served not in self._delivered.converted:
                raise self._error(
                    f"{entry.name} was published as {entry.dtype}, but {piece.served} is served as "
                    f"{str(dtype).removeprefix('torch.')}, and the engine adapter declares no conversion"
                )

    def _check_order(self) -> None:
        """Tensors whose names differ in numbers only are served in the order of the numbers."""
        families: dict[str, list[tuple[tuple[int, ...], tuple[tuple[int, ...], int], str]]] = {}
        for name, pieces in self._pieces.items():
            if name in self._expected or not pieces:
                continue
            first = min(pieces, key=lambda piece: piece.source.offset)
            family = _NUMBER.sub("#", name) + " " + _NUMBER.sub("#", first.served)
            place = (_numbers(first.served), first.target.offset)
            families.setdefault(family, []).append((_numbers(name), place, name))
        for members in families.values():
            members.sort()
            for (_, before, _), (_, place, name) in zip(members, members[1:], strict=False):
                if place <= before:
                    raise self._error(f"{name} is served out of order, before its predecessor")

    def _check_served(self) -> None:
        """Every served element comes from a published one, once."""
        targets = self._learned.targets()
        done = {name for one in self._delivered.computed for name in one.served}
        done |= {self._memory.canonical(self._delivered.tensors[name]) or name for name in done}
        for name, tensor in self._delivered.tensors.items():
            if not tensor.numel() or self._memory.canonical(tensor) in done:
                continue
            done.add(name)
            loaded = targets.get(name, [])
            views = [view for _, view in loaded]
            lost = missing_element([*views, *self._learned.constant.get(name, ())], view_of(tensor))
            if lost is not None:
                raise self._error(
                    f"{name} is served, but its element {lost} comes from no published tensor{self._hints()}"
                )
            unexplained = {published: view for published, view in loaded if published not in self._expected}
            # Tied weights may be published by two names, of which the tables explain one.
            once = [view for name, view in loaded if name in unexplained or view not in unexplained.values()]
            if unexplained and overlap(once):
                first = next(iter(unexplained))
                raise self._error(f"{name} is served with an element that was loaded twice: {first}")

    def _hints(self) -> str:
        unused = [name for name, pieces in self._pieces.items() if not pieces and name not in self._expected]
        published = [f"published but not loaded here: {', '.join(unused[:3])}"] if unused else []
        notes = [*published, *filter(None, [self._learned.note])]
        return f" ({'; '.join(notes)})" if notes else ""

    def _coverage(self) -> Coverage:
        """Count elements of published tensors that are served; the tables explain all that is computed."""
        computed = sum(
            self._delivered.tensors[name].numel() for one in self._delivered.computed for name in one.served
        )
        sizes = {name: sum(p.target.numel for p in pieces) for name, pieces in self._pieces.items()}
        unexplained = sorted(sizes.keys() - self._expected, key=lambda name: (-sizes[name], name))
        missing = sum(sizes[name] for name in unexplained)
        served = computed + sum(sizes.values())
        first = tuple(name for name in unexplained[:MOST_NAMED] if sizes[name])
        return Coverage(served, served - missing, len(self._expected), first)

    def _share(self) -> RankShare:
        share: RankShare = {}
        for entry in self._manifest.tensors:
            numel = math.prod(entry.shape)
            if not numel or entry.name in self._absent:
                continue
            computed = self._computed.get(entry.name)
            views = (
                [piece.source for piece in self._pieces[entry.name]]
                if computed is None
                else list(computed.sources[entry.name])
            )
            share[entry.name] = (numel, [(*view,) for view in views])
        return share


def _places(pieces: Sequence[Piece], positions: Positions) -> set[tuple[int, str, int]]:
    """Return (published position, served tensor, served position) of every position that is served."""
    found = set()
    for piece in pieces:
        held, places = piece.places(positions)
        found |= {(int(p), piece.served, int(s)) for p, s in zip(positions[held], places, strict=True)}
    return found


def _at(places: set[tuple[int, str, int]], position: int) -> str:
    return " and ".join(f"{name}[{s}]" for p, name, s in sorted(places) if p == position) or "nothing"


def _numbers(name: str) -> tuple[int, ...]:
    return tuple(map(int, _NUMBER.findall(name)))
