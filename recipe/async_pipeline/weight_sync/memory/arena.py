# SPDX-License-Identifier: Apache-2.0
"""Host memory that training ranks write and replicas on the same host map.

An arena is a list of shared-memory segments ("buckets"). They are created on demand, touched by the first
write and reused for every later version: the first touch of fresh shared memory is ten times slower than
a later write.

Each rank copies its shard straight to its place in the whole tensor. No rank holds a whole tensor, and
the ranks exchange no data. Ranks on several hosts write their blocks into the memory of their host, and
the hosts with consumers join them (`shares.py`). If an engine can only hand out assembled tensors, the owner
alone writes them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import NamedTuple

import torch

from ...errors import CorruptionError, WeightSyncError
from ..hosts.shares import Alone, BlockPlace, HostRanks, laid_out, share_of, used_by, view_of_block
from ..proof.proof import draw_sample, sampled_names
from .board import Board
from .dual_buffer import DualBuffer
from .manifest import (
    Announcement,
    Block,
    BucketEntry,
    Failure,
    Layout,
    Manifest,
    TensorEntry,
    WeightTicket,
    encode,
)
from .memory_work import copy_all
from .segment import Segment, create_segment, direct_ranges, view_of
from .segment_names import SHM_DIR, sweep_orphans

ANNOUNCE_S = 600.0
"""Deadline for the checksums of a version, started one update earlier; the slowest host hashes 1 GB/s."""


class HeldBlock(NamedTuple):
    """The block of a tensor that this rank holds, if any."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dtype: torch.dtype
    offset: tuple[int, ...]
    """Index of the block's first element in the whole tensor."""
    values: torch.Tensor | None
    block: tuple[int, ...] | None = None
    """Shape of the block, if `values` has more dimensions: a view of the elements in the block's order."""

    @property
    def extent(self) -> tuple[int, ...]:
        """Shape of the block that this rank holds."""
        assert self.values is not None
        return tuple(self.values.shape) if self.block is None else self.block

    @property
    def slices(self) -> tuple[slice, ...]:
        """Where the block is in the whole tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.extent, strict=True))


class Arena:
    """One slot of the dual buffer, with as many buckets as the largest version needed so far."""

    def __init__(self, bucket_bytes: int, dtype: torch.dtype | None) -> None:
        """Cast floating-point tensors to `dtype`; None keeps their dtype."""
        self._bucket_bytes, self._dtype = bucket_bytes, dtype
        self._segments: list[Segment] = []
        self._layout = Layout(bucket_bytes)
        self._blocks: list[Block] | None = None
        """The blocks of this host's ranks, if ranks are on other hosts too; `_layout` then describes a copy
        in which all blocks are joined.
        """
        self._described: list[tuple[str, tuple[int, ...], torch.dtype]] = []
        """The parts that the layout was computed for."""
        self._targets: list[torch.Tensor] = []
        """Views of the buckets, one for each part that this rank holds."""

    @property
    def num_bytes(self) -> int:
        return sum(self._used)

    @property
    def _used(self) -> list[int]:
        """Bytes of each bucket."""
        return self._layout.used if self._blocks is None else used_by(self._blocks)

    def write_parts(self, parts: Sequence[HeldBlock], ranks: HostRanks) -> None:
        """Copy this rank's blocks. All ranks call this with the same tensors in the same order."""
        described = [(part.name, part.shape, part.dtype) for part in parts]
        held = [part for part in parts if part.values is not None and part.values.numel()]
        if described != self._described:
            self._layout, self._blocks, self._described = Layout(self._bucket_bytes), None, []
            for name, shape, dtype in described:
                self._place(name, shape, dtype)
            if ranks.hosts == 1:
                self._share_segments(ranks)
                places = {entry.name: entry for entry in self._layout.tensors}
                self._targets = [self._target(places[part.name], part) for part in held]
            else:
                self._targets = self._lay_out_blocks(parts, ranks)
            self._described = described
        self._copy(self._targets, [part.values.detach() for part in held if part.values is not None])
        ranks.barrier()

    def write_whole(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy whole tensors in the order of iteration."""
        before = self._layout.used
        self._layout, self._blocks, self._described = Layout(self._bucket_bytes), None, []
        device: torch.device | None = None
        for name, tensor in weights:
            entry = self._place(name, tuple(tensor.shape), tensor.dtype)
            if (
                entry.bucket == len(self._segments)
                or self._segments[entry.bucket].size < self._layout.used[-1]
            ):
                self._require_segment(entry.bucket, self._layout.used[-1])
            self._segments[entry.bucket].reserve(self._layout.used[-1])
            if tensor.is_cuda and device is None:
                # The previous version tells how many bytes of the buckets will be used.
                for segment, nbytes in zip(self._segments, before, strict=False):
                    segment.pin([(0, nbytes)])
            device = tensor.device if tensor.is_cuda else device
            view_of(self._segments, entry).copy_(tensor.detach(), non_blocking=tensor.is_cuda)
        if device is not None:
            torch.cuda.synchronize(device)

    def describe(
        self, version: int, publication: int, proof_tensors: int, adapter: str | None
    ) -> Announcement:
        """Return the manifest: checksums of all buckets, samples for the verification, and the layout.

        `publication` is the number of weight updates before this one.
        """
        tensors = {entry.name: entry for entry in self._layout.tensors}
        sampled = sampled_names(tuple(tensors), publication, proof_tensors)
        filled = list(zip(self._segments, self._used, strict=False))
        buckets = tuple(BucketEntry(segment.name, used, segment.checksum(used)) for segment, used in filled)
        if self._blocks is not None:
            raw = [segment.bytes for segment in self._segments]
            return share_of(version, self._layout.tensors, self._blocks, raw, buckets, sampled, adapter)
        return Manifest(
            version=version,
            tensors=tuple(self._layout.tensors),
            samples=tuple(
                draw_sample(version, name, view_of(self._segments, tensors[name])) for name in sampled
            ),
            buckets=buckets,
            adapter=adapter,
        )

    def close(self) -> None:
        for segment in self._segments:
            segment.close()

    def _place(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> TensorEntry:
        target = self._dtype if self._dtype is not None and dtype.is_floating_point else dtype
        return self._layout.place(name, shape, str(target).removeprefix("torch."), target.itemsize)

    def _lay_out_blocks(self, parts: Sequence[HeldBlock], ranks: HostRanks) -> list[torch.Tensor]:
        """Lay out the blocks of all ranks of this host; return the targets of this rank."""
        mine = [
            BlockPlace(index, part.offset, part.extent)
            for index, part in enumerate(parts)
            if part.values is not None and part.values.numel()
        ]
        places = ranks.all(mine)
        of_all = [place for of_rank in places for place in of_rank]
        self._blocks = laid_out(self._layout.tensors, of_all, self._bucket_bytes)
        self._share_segments(ranks)
        if ranks.rank == 0:
            # A host that joins the blocks sends them on without what is between them.
            for segment, nbytes in zip(self._segments, self._used, strict=False):
                segment.bytes[:nbytes].zero_()
        ranks.barrier()
        first = sum(len(of_rank) for of_rank in places[: ranks.rank])
        own = self._blocks[first : first + len(mine)]
        held = [part.values.shape for part in parts if part.values is not None and part.values.numel()]
        return [
            view_of_block(
                self._segments[block.bucket].bytes, block, self._layout.tensors[block.tensor].dtype
            ).view(shape)
            for block, shape in zip(own, held, strict=True)
        ]

    def _share_segments(self, ranks: HostRanks) -> None:
        """Have all ranks of this host map the buckets of the owner."""
        used = self._used
        if ranks.rank == 0:
            for bucket, nbytes in enumerate(used):
                self._require_segment(bucket, nbytes)
                self._segments[bucket].reserve(nbytes)
        names = ranks.share([segment.name for segment in self._segments])
        if ranks.rank != 0:
            self.close()
            self._segments = [
                Segment(name, nbytes, create=False) for name, nbytes in zip(names, used, strict=False)
            ]

    def _require_segment(self, bucket: int, nbytes: int) -> None:
        """Ensure that a bucket has a segment in which it can grow to its full size."""
        size = max(self._bucket_bytes, nbytes)
        if bucket == len(self._segments):
            self._segments.append(create_segment(size))
        elif self._segments[bucket].size < nbytes:
            self._segments[bucket].close()
            self._segments[bucket] = create_segment(size)

    def _target(self, entry: TensorEntry, part: HeldBlock) -> torch.Tensor:
        assert part.values is not None
        return view_of(self._segments, entry)[part.slices].view(part.values.shape)

    def _copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        device = next((source.device for source in sources if source.is_cuda), None)
        if device is not None:
            ranges = direct_ranges(targets)
            for segment in self._segments:
                segment.pin(ranges.get(segment.address, ()))
            torch._foreach_copy_(targets, sources, non_blocking=True)
            torch.cuda.synchronize(device)
        else:
            copy_all(targets, sources)


class ArenaWriter:
    """The trainer's side: gathers versions alternately into two arenas."""

    def __init__(
        self, bucket_bytes: int, proof_tensors: int, dtype: torch.dtype | None, ranks: HostRanks | None = None
    ) -> None:
        self._ranks: HostRanks = ranks or Alone()
        self._owner = self._ranks.rank == 0
        self._arenas = (Arena(bucket_bytes, dtype), Arena(bucket_bytes, dtype))
        self._boards: list[Board] = []
        self._announced: list[Future[None] | None] = [None, None]
        self._publications = 0
        self._buffer = DualBuffer()
        self._proof_tensors = proof_tensors
        # Hashing releases the interpreter lock, so this thread does not slow the copies down.
        self._announcer = ThreadPoolExecutor(1, thread_name_prefix="announce")
        if self._owner:
            sweep_orphans()
            self._boards = [Board(), Board()]

    def gather(
        self, version: int, weights: Iterable[tuple[str, torch.Tensor]], adapter: str | None = None
    ) -> WeightTicket:
        """Copy all weights in and return the ticket. For the owner only; after an error the old version
        is intact.

        `adapter` describes the weights if they are a LoRA adapter; see `Manifest`. Raises WeightSyncError
        if the version is not newer than the last or memory runs out.
        """
        ticket = self._gather(version, lambda arena: arena.write_whole(weights), adapter)
        assert ticket is not None, "only the owner gathers whole tensors"
        return ticket

    def gather_parts(
        self, version: int, parts: Sequence[HeldBlock], adapter: str | None = None
    ) -> WeightTicket | None:
        """Copy this rank's blocks in. A collective; the owner gets the ticket, other ranks None.

        Otherwise like `gather`.
        """
        return self._gather(version, lambda arena: arena.write_parts(parts, self._ranks), adapter)

    def close(self) -> None:
        """Unlink all segments; receivers keep their mappings."""
        self._announcer.shutdown()
        for arena in self._arenas:
            arena.close()
        for board in self._boards:
            board.close()

    def _gather(
        self, version: int, write: Callable[[Arena], None], adapter: str | None = None
    ) -> WeightTicket | None:
        started = time.perf_counter()
        slot = self._buffer.begin_fill(version)
        try:
            self._free(slot)
            write(self._arenas[slot])
        except BaseException:
            self._buffer.abort()
            raise

        self._buffer.commit()
        if not self._owner:
            return None

        ticket = WeightTicket(
            version=version,
            board=self._boards[slot].name,
            pid=os.getpid(),
            num_bytes=self._arenas[slot].num_bytes,
            gather_s=time.perf_counter() - started,
        )

        self._announced[slot] = self._announcer.submit(
            self._announce, slot, version, self._publications, adapter
        )
        self._publications += 1
        return ticket

    def _free(self, slot: int) -> None:
        """Wait until the slot's previous version is announced, then take its announcement away."""
        announced, self._announced[slot] = self._announced[slot], None
        if announced is not None:
            try:
                announced.result(ANNOUNCE_S)
            except FutureTimeout:
                raise WeightSyncError(
                    f"checksums of the previous version did not end within {ANNOUNCE_S:g} s"
                ) from None
        if self._owner:
            self._boards[slot].clear()

    def _announce(self, slot: int, version: int, publication: int, adapter: str | None) -> None:
        try:
            described = self._arenas[slot].describe(version, publication, self._proof_tensors, adapter)
            self._boards[slot].post(encode(described))
        except Exception as error:
            # Readers of the board learn of the failure now, the trainer at its next gather into this
            # slot.
            self._boards[slot].post(encode(Failure(f"{type(error).__name__}: {error}")))
            raise


class ArenaReader:
    """A receiver's side: maps segments once and hands out tensors that alias them."""

    def __init__(self) -> None:
        self._segments: dict[str, Segment] = {}

    def verify(self, manifest: Manifest) -> None:
        """Compare all buckets with the trainer's checksums. Raises CorruptionError if one differs."""
        for segment, bucket in zip(self._map(manifest), manifest.buckets, strict=True):
            if segment.checksum(bucket.nbytes) != bucket.xxh3:
                raise CorruptionError(
                    f"v{manifest.version}: bucket {bucket.segment} is corrupt (xxh3 differs)"
                )

    def bucket(self, manifest: Announcement, sequence: int) -> torch.Tensor:
        """Return the bytes of one bucket, an alias of the arena."""
        return self._map(manifest)[sequence].bytes[: manifest.buckets[sequence].nbytes]

    def tensors(self, manifest: Manifest) -> dict[str, torch.Tensor]:
        """Return all tensors by name, aliases of the arena."""
        segments = self._map(manifest)
        return {entry.name: view_of(segments, entry) for entry in manifest.tensors}

    def read(self, manifest: Manifest, piece_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Yield named tensors, aliases of the arena, in pieces of at most `piece_bytes`."""
        segments = self._map(manifest)
        for piece in manifest.pieces(piece_bytes):
            yield [(entry.name, view_of(segments, entry)) for entry in piece]

    def pinning(self, manifest: Manifest, tensors: Iterable[torch.Tensor]) -> Callable[[], None]:
        """Return a call, for any thread, that lets CUDA devices copy from aliases of a version directly.

        It ends this for everything else in the version's memory; see `Segment.pin`.
        """
        segments = self._map(manifest)

        def pin() -> None:
            ranges = direct_ranges(tensors)
            for segment in segments:
                segment.pin(ranges.get(segment.address, ()))

        return pin

    def _map(self, manifest: Announcement) -> list[Segment]:
        names = {b.segment for b in manifest.buckets}
        for bucket in manifest.buckets:
            known = self._segments.get(bucket.segment)
            if known is None or known.size < bucket.nbytes:
                self._segments[bucket.segment] = Segment(bucket.segment, bucket.nbytes, create=False)
                if known is not None:
                    # The trainer uses more of the segment. Tensors of the old mapping keep it.
                    known.close()
        # Keep the mappings of two versions; drop segments that larger ones replaced.
        for name in list(self._segments):
            if name not in names and not (SHM_DIR / name).exists():
                self._segments.pop(name).close()
        return [self._segments[b.segment] for b in manifest.buckets]
