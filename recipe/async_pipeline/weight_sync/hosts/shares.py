# SPDX-License-Identifier: Apache-2.0
"""Versions that several training hosts hold parts of: lay out the blocks of a host, and join them all.

Ranks on several hosts write the blocks that they hold into the memory of their host, and no rank
assembles a tensor. A host with consumers receives the buckets of all training hosts and copies each block
to its place in the whole tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from ...errors import WeightSyncError
from ..memory.manifest import (
    Announcement,
    Block,
    BucketEntry,
    Layout,
    Manifest,
    PartialSample,
    Sample,
    Share,
    TensorEntry,
    check_places,
    check_sizes,
)
from ..memory.memory_work import checksum
from ..memory.segment import Segment, view_of
from ..proof.proof import draw_sample, sample_positions, to_bytes

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""Dtypes that NumPy has too, by the size of an element; it has no bfloat16."""


class Memory(Protocol):
    """Memory for one version."""

    segments: dict[int, Segment]

    def memory(self, index: int, nbytes: int) -> Segment:
        """Return segment `index`, with at least `nbytes` bytes."""


class Bucket(NamedTuple):
    """Names one bucket of a version."""

    share: int
    """Index of the training host that wrote it."""
    sequence: int
    """Index among the buckets of that host."""


class BlockPlace(NamedTuple):
    """A block that a rank holds."""

    tensor: int
    """Index of its tensor."""
    start: tuple[int, ...]
    shape: tuple[int, ...]


def laid_out(tensors: Sequence[TensorEntry], places: Sequence[BlockPlace], bucket_bytes: int) -> list[Block]:
    """Return where the blocks of one host are in its buckets, in the order of `places`."""
    layout, blocks = Layout(bucket_bytes), []
    for place in places:
        of = tensors[place.tensor]
        itemsize = getattr(torch, of.dtype).itemsize
        at = layout.place("", place.shape, of.dtype, itemsize)
        blocks.append(Block(place.tensor, place.start, place.shape, at.bucket, at.offset, at.nbytes))
    return blocks


def used_by(blocks: Sequence[Block] | Sequence[TensorEntry]) -> list[int]:
    """Return the number of bytes of each bucket."""
    used = [0] * (1 + max((block.bucket for block in blocks), default=-1))
    for block in blocks:
        used[block.bucket] = max(used[block.bucket], block.offset + block.nbytes)
    return used


def view_of_block(raw: torch.Tensor, block: Block, dtype: str) -> torch.Tensor:
    """Return a block as an alias of its bucket `raw`, a tensor of bytes."""
    return raw[block.offset : block.offset + block.nbytes].view(getattr(torch, dtype)).view(block.shape)


def partial_sample(
    version: int, of: TensorEntry, blocks: Sequence[tuple[Block, torch.Tensor]]
) -> PartialSample:
    """Return the values of a tensor's sample that are in these blocks."""
    numel = math.prod(of.shape)
    if numel == 0:
        return PartialSample(of.name, (), b"")
    shape = of.shape or (1,)
    positions = np.stack(np.unravel_index(sample_positions(version, of.name, numel), shape))
    found: dict[int, bytes] = {}
    for block, values in blocks:
        start = np.array(block.start or (0,)).reshape(-1, 1)
        end = start + np.array(block.shape or (1,)).reshape(-1, 1)
        mine: npt.NDArray[np.int64] = np.flatnonzero(((positions >= start) & (positions < end)).all(axis=0))
        where = tuple(torch.from_numpy(axis) for axis in positions[:, mine] - start)
        drawn = to_bytes(values.reshape(block.shape or (1,))[where])
        for order, index in enumerate(mine.tolist()):
            found[index] = drawn[order * values.itemsize : (order + 1) * values.itemsize]
    indices = sorted(found)
    return PartialSample(of.name, tuple(indices), b"".join(found[index] for index in indices))


def share_of(
    version: int,
    tensors: Sequence[TensorEntry],
    blocks: Sequence[Block],
    raw: Sequence[torch.Tensor],
    buckets: tuple[BucketEntry, ...],
    sampled: Sequence[str],
    adapter: str | None,
) -> Share:
    """Return what a host announces. `raw` has the bytes of its buckets.

    `sampled` names the tensors to verify.
    """
    held: dict[int, list[tuple[Block, torch.Tensor]]] = {}
    for block in blocks:
        values = view_of_block(raw[block.bucket], block, tensors[block.tensor].dtype)
        held.setdefault(block.tensor, []).append((block, values))
    index_of = {entry.name: index for index, entry in enumerate(tensors)}
    return Share(
        version=version,
        tensors=tuple(tensors),
        blocks=tuple(blocks),
        buckets=buckets,
        samples=tuple(
            partial_sample(version, tensors[index_of[name]], held.get(index_of[name], [])) for name in sampled
        ),
        adapter=adapter,
    )


class Landing(Protocol):
    """How the buckets of a version become a local copy. Methods may run in several threads."""

    version: int

    def take(self, memory: Memory, bucket: Bucket, payload: memoryview) -> bool:
        """Take a bucket of the right length in, if its checksum is right. Returns whether it is."""

    def payload(self, memory: Memory, bucket: Bucket) -> npt.NDArray[np.uint8]:
        """Return the bytes of a bucket that was taken in, as the trainer announced them."""

    def manifest(self, memory: Memory) -> Manifest:
        """Return the manifest of the complete local copy."""


def landing_of(announced: Sequence[Announcement]) -> Landing:
    """Return how these shares land. Raises WeightSyncError if they do not form a version."""
    whole = announced[0]
    if isinstance(whole, Manifest):
        if len(announced) > 1:
            raise WeightSyncError(f"v{whole.version} is complete on one host and has more shares")
        return _Whole(whole)
    return _Joined([_as_share(share, whole) for share in announced])


class _Whole:
    """A version of one training host: the local buckets are the trainer's."""

    def __init__(self, manifest: Manifest) -> None:
        self.version, self._manifest = manifest.version, manifest

    def take(self, memory: Memory, bucket: Bucket, payload: memoryview) -> bool:
        wanted = self._manifest.buckets[bucket.sequence]
        segment = memory.memory(bucket.sequence, wanted.nbytes)
        np.copyto(segment.bytes.numpy()[: wanted.nbytes], np.frombuffer(payload, dtype=np.uint8))
        return segment.checksum(wanted.nbytes) == wanted.xxh3

    def payload(self, memory: Memory, bucket: Bucket) -> npt.NDArray[np.uint8]:
        nbytes = self._manifest.buckets[bucket.sequence].nbytes
        found: npt.NDArray[np.uint8] = memory.segments[bucket.sequence].bytes[:nbytes].numpy()
        return found

    def manifest(self, memory: Memory) -> Manifest:
        buckets = tuple(
            msgspec.structs.replace(bucket, segment=memory.segments[index].name)
            for index, bucket in enumerate(self._manifest.buckets)
        )
        return msgspec.structs.replace(self._manifest, buckets=buckets)


class _Joined:
    """A version of several training hosts: blocks are copied to their places in whole tensors."""

    def __init__(self, shares: Sequence[Share]) -> None:
        self.version, self._shares = shares[0].version, shares
        self._tensors = shares[0].tensors
        check_sizes(self.version, self._tensors)
        check_places(self.version, self._tensors)
        self._used = used_by(self._tensors)
        _check_blocks(shares)
        self._samples = _joined_samples(shares)
        self._blocks: dict[Bucket, list[Block]] = {}
        for index, share in enumerate(shares):
            for block in share.blocks:
                self._blocks.setdefault(Bucket(index, block.bucket), []).append(block)

    def take(self, memory: Memory, bucket: Bucket, payload: memoryview) -> bool:
        wanted = self._shares[bucket.share].buckets[bucket.sequence]
        if checksum(payload) != wanted.xxh3:
            return False
        raw = np.frombuffer(payload, dtype=np.uint8)
        for block, target in self._targets(memory, bucket):
            np.copyto(
                target,
                raw[block.offset : block.offset + block.nbytes].view(target.dtype).reshape(block.shape),
            )
        return True

    def payload(self, memory: Memory, bucket: Bucket) -> npt.NDArray[np.uint8]:
        raw = np.zeros(self._shares[bucket.share].buckets[bucket.sequence].nbytes, dtype=np.uint8)
        for block, source in self._targets(memory, bucket):
            raw[block.offset : block.offset + block.nbytes] = (
                np.ascontiguousarray(source).reshape(-1).view(np.uint8)
            )
        return raw

    def manifest(self, memory: Memory) -> Manifest:
        """Return the manifest. Raises WeightSyncError if the joined tensors differ from the samples."""
        segments = [memory.memory(index, nbytes) for index, nbytes in enumerate(self._used)]
        places = {entry.name: entry for entry in self._tensors}
        for sample in self._samples:
            if draw_sample(self.version, sample.name, view_of(segments, places[sample.name])) != sample:
                raise WeightSyncError(f"v{self.version}: {sample.name} was not joined correctly")
        return Manifest(
            version=self.version,
            tensors=self._tensors,
            buckets=tuple(
                BucketEntry(segment.name, nbytes, segment.checksum(nbytes))
                for segment, nbytes in zip(segments, self._used, strict=True)
            ),
            samples=self._samples,
            adapter=self._shares[0].adapter,
        )

    def _targets(self, memory: Memory, bucket: Bucket) -> list[tuple[Block, npt.NDArray[Any]]]:
        """Return the blocks of a bucket with their places in whole tensors, as integers of the same size."""
        found = []
        for block in self._blocks.get(bucket, ()):
            entry = self._tensors[block.tensor]
            segment = memory.memory(entry.bucket, self._used[entry.bucket])
            whole = view_of([segment], msgspec.structs.replace(entry, bucket=0))
            inside = tuple(slice(o, o + n) for o, n in zip(block.start, block.shape, strict=True))
            found.append((block, whole.view(_BITS[whole.itemsize])[inside].numpy()))
        return found


def _as_share(share: Announcement, first: Share) -> Share:
    alike = isinstance(share, Share) and (share.version, share.tensors, share.adapter) == (
        first.version,
        first.tensors,
        first.adapter,
    )
    if not alike:
        raise WeightSyncError(f"the training hosts announced different tensors for v{first.version}")
    assert isinstance(share, Share)
    return share


def _check_blocks(shares: Sequence[Share]) -> None:
    """Raise WeightSyncError unless the blocks are inside their buckets and tensors and cover each once."""
    tensors, version = shares[0].tensors, shares[0].version
    covering: dict[int, list[Block]] = {index: [] for index in range(len(tensors))}
    for share in shares:
        for block in share.blocks:
            of = tensors[block.tensor] if block.tensor < len(tensors) else None
            fits = (
                of is not None
                and block.bucket < len(share.buckets)
                and block.offset + block.nbytes <= share.buckets[block.bucket].nbytes
                and len(block.start) == len(block.shape) == len(of.shape)
                and all(o + n <= size for o, n, size in zip(block.start, block.shape, of.shape, strict=True))
                and block.nbytes == math.prod(block.shape) * getattr(torch, of.dtype).itemsize
            )
            if not fits:
                raise WeightSyncError(f"v{version}: a block of a training host does not fit its tensor")
            covering[block.tensor].append(block)

    for index, blocks in covering.items():
        covered = sum(math.prod(block.shape) for block in blocks)
        if covered != math.prod(tensors[index].shape) or _overlap(blocks):
            raise WeightSyncError(
                f"v{version}: the training hosts do not hold each element of {tensors[index].name} once"
            )


def _overlap(blocks: Sequence[Block]) -> bool:
    """Return whether two blocks of one tensor share elements. Blocks in order of their start are quick."""
    ordered = sorted(blocks, key=lambda block: block.start)
    for index, one in enumerate(ordered):
        for other in ordered[index + 1 :]:
            if one.shape and other.start[0] >= one.start[0] + one.shape[0]:
                break
            if all(
                a < b + m and b < a + n
                for a, n, b, m in zip(one.start, one.shape, other.start, other.shape, strict=True)
            ):
                return True
    return False


def _joined_samples(shares: Sequence[Share]) -> tuple[Sample, ...]:
    """Return the whole samples. Raises WeightSyncError if the hosts do not hold each value once."""
    entries: Mapping[str, TensorEntry] = {entry.name: entry for entry in shares[0].tensors}
    found: dict[str, dict[int, bytes]] = {}
    for share in shares:
        for sample in share.samples:
            if sample.name not in entries:
                raise WeightSyncError(f"v{share.version}: a sample is of no tensor: {sample.name}")
            itemsize = getattr(torch, entries[sample.name].dtype).itemsize
            values = found.setdefault(sample.name, {})
            for order, index in enumerate(sample.indices):
                values[index] = sample.values[order * itemsize : (order + 1) * itemsize]
    return tuple(Sample(name, _in_order(shares[0].version, entries[name], of)) for name, of in found.items())


def _in_order(version: int, entry: TensorEntry, values: Mapping[int, Any]) -> bytes:
    numel = math.prod(entry.shape)
    expected = len(sample_positions(version, entry.name, numel)) if numel else 0
    if sorted(values) != list(range(expected)):
        raise WeightSyncError(f"v{version}: the sample of {entry.name} is incomplete")
    return b"".join(values[index] for index in range(expected))


T = TypeVar("T")


class HostRanks(Protocol):
    """The training ranks of one host, which fill an arena together. Rank 0 of them owns it."""

    rank: int
    hosts: int
    """Number of hosts with training ranks."""

    def share(self, value: T) -> T:
        """Return rank 0's value. A collective."""

    def all(self, value: T) -> list[T]:
        """Return the values of all ranks of this host, by rank. A collective."""

    def barrier(self) -> None:
        """Wait for all ranks of this host."""


class Alone:
    """A single rank."""

    rank = 0
    hosts = 1

    def share(self, value: T) -> T:
        return value

    def all(self, value: T) -> list[T]:
        return [value]

    def barrier(self) -> None:
        pass
