# SPDX-License-Identifier: Apache-2.0
"""Blocks of several training hosts are joined to the version that one host would have announced."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.async_pipeline.errors import WeightSyncError
from recipe.async_pipeline.weight_sync.hosts.host_memory import HostMemory, VersionRequest
from recipe.async_pipeline.weight_sync.hosts.host_slots import this_process
from recipe.async_pipeline.weight_sync.hosts.shares import Bucket, landing_of
from recipe.async_pipeline.weight_sync.hosts.transport import Mapped
from recipe.async_pipeline.weight_sync.memory.arena import ArenaReader, ArenaWriter, HeldBlock
from recipe.async_pipeline.weight_sync.memory.board import await_announcement, await_manifest
from recipe.async_pipeline.weight_sync.memory.manifest import (
    Manifest,
    Share,
    WeightTicket,
    decode_announcement,
    encode,
    joined,
)
from tests import HANG_S

BUCKET_BYTES = 256
Weights = dict[str, torch.Tensor]


class HostRanks:
    """The ranks of one host, in threads."""

    def __init__(self, rank: int, hosts: int, together: Barrier, values: list[Any]) -> None:
        self.rank, self.hosts, self._together, self._values = rank, hosts, together, values

    def share(self, value: Any) -> Any:
        return self.all(value)[0]

    def all(self, value: Any) -> list[Any]:
        self._values[self.rank] = value
        self.barrier()
        found = list(self._values)
        self.barrier()
        return found

    def barrier(self) -> None:
        self._together.wait(HANG_S)


class Slice(NamedTuple):
    """The elements of a tensor that one rank holds: those from `start` to `end` along `dim`."""

    dim: int
    start: int
    end: int


def part(name: str, tensor: torch.Tensor, held: Slice | None) -> HeldBlock:
    shape = tuple(tensor.shape)
    if held is None:
        return HeldBlock(name, shape, tensor.dtype, (0,) * tensor.dim(), None)
    offset = tuple(held.start if d == held.dim else 0 for d in range(tensor.dim()))
    values = tensor.narrow(held.dim, held.start, held.end - held.start) if tensor.dim() else tensor
    return HeldBlock(name, shape, tensor.dtype, offset, values)


class Cluster:
    """Training hosts with some ranks each, in this process."""

    def __init__(self, ranks_of_hosts: Sequence[int], dtype: torch.dtype | None = None) -> None:
        self.writers: list[ArenaWriter] = []
        self.hosts: list[int] = []
        for host, ranks in enumerate(ranks_of_hosts):
            together, values = Barrier(ranks), [None] * ranks
            for rank in range(ranks):
                of_rank = HostRanks(rank, len(ranks_of_hosts), together, values)
                self.writers.append(ArenaWriter(BUCKET_BYTES, 3, dtype, of_rank))
                self.hosts.append(host)

    def gather(self, version: int, weights: Weights, held: dict[str, list[Slice | None]]) -> WeightTicket:
        """Have all ranks write; `held` has a slice of each tensor for each rank."""

        def write(rank: int) -> WeightTicket | None:
            parts = [part(name, tensor, held[name][rank]) for name, tensor in weights.items()]
            return self.writers[rank].gather_parts(version, parts)

        with ThreadPoolExecutor(len(self.writers)) as threads:
            tickets = list(threads.map(write, range(len(self.writers))))
        return joined(
            [
                msgspec.structs.replace(ticket, host=f"host {host}")
                for ticket, host in zip(tickets, self.hosts, strict=True)
                if ticket is not None
            ]
        )

    def close(self) -> None:
        for writer in self.writers:
            writer.close()


def mapped(ticket: WeightTicket) -> VersionRequest:
    reader = ArenaReader()
    return VersionRequest(ticket, [Mapped(reader, share, HANG_S) for share in ticket.shares], HANG_S)


class FromMemory:
    """A transport of one share from another host's memory."""

    def __init__(self, memory: HostMemory, request: VersionRequest, share: int) -> None:
        self.memory, self.request, self.share = memory, request, share

    async def announced(self) -> Any:
        return await self.request.transports[self.share].announced()

    async def bucket(self, bucket: Bucket, attempt: int, base: int | None = None) -> tuple[bytes, Any]:
        async with self.memory.lend(self.request, bucket) as (header, payload):
            return header, bytes(payload)


async def received(ticket: WeightTicket) -> list[Weights]:
    """Return what three hosts have: the first from the training hosts, the second from it, the third is a
    training host.
    """
    first, second, third = HostMemory("first"), HostMemory("second"), HostMemory("host 0")
    request, reader = mapped(ticket), this_process("a test")
    relayed = VersionRequest(
        ticket, [FromMemory(first, request, i) for i in range(len(ticket.shares))], HANG_S
    )
    try:
        found = [
            await first.fetch(request, reader),
            await second.fetch(relayed, reader),
            await third.fetch(request, reader),
        ]
        for manifest in found:
            ArenaReader().verify(manifest)
        return [{n: t.clone() for n, t in ArenaReader().tensors(manifest).items()} for manifest in found]
    finally:
        for memory in (first, second, third):
            await memory.close()


def same(found: Weights, wanted: Weights) -> bool:
    return list(found) == list(wanted) and all(
        found[n].dtype == t.dtype and found[n].shape == t.shape and torch.equal(found[n], t)
        for n, t in wanted.items()
    )


def split(length: int, cuts: Sequence[int], dim: int) -> list[Slice | None]:
    edges = [0, *sorted(min(cut, length) for cut in cuts), length]
    return [Slice(dim, a, b) if b > a else None for a, b in zip(edges, edges[1:], strict=False)]


@st.composite
def sharded(draw: st.DrawFn) -> tuple[list[int], Weights, dict[str, list[Slice | None]]]:
    hosts = draw(st.lists(st.integers(1, 2), min_size=2, max_size=3))
    ranks = sum(hosts)
    weights: Weights = {}
    held: dict[str, list[Slice | None]] = {}
    for index in range(draw(st.integers(1, 4))):
        shape = draw(st.lists(st.integers(1, 9), max_size=3))
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8]))
        weights[f"w{index}"] = torch.arange(index, index + int(torch.tensor(shape).prod() if shape else 1))
        weights[f"w{index}"] = weights[f"w{index}"].reshape(shape).to(dtype)
        if not shape:
            held[f"w{index}"] = [Slice(0, 0, 1), *[None] * (ranks - 1)]
            continue
        dim = draw(st.integers(0, len(shape) - 1))
        cuts = draw(st.lists(st.integers(0, 9), min_size=ranks - 1, max_size=ranks - 1))
        held[f"w{index}"] = split(shape[dim], cuts, dim)
    return hosts, weights, held


@pytest.mark.slow
@settings(deadline=None, database=None, derandomize=True, max_examples=40)
@given(sharded())
def test_any_blocks_are_joined_and_sent_on(
    drawn: tuple[list[int], Weights, dict[str, list[Slice | None]]],
) -> None:
    hosts, weights, held = drawn
    cluster = Cluster(hosts)
    try:
        for version in range(3):
            values = {name: tensor + version for name, tensor in weights.items()}
            ticket = cluster.gather(version, values, held)
            assert len(ticket.shares) == len(hosts)
            assert all(same(found, values) for found in asyncio.run(received(ticket)))
    finally:
        cluster.close()


def whole_weights() -> Weights:
    return {"a": torch.randn(6, 50), "b": torch.randn(4), "c": torch.randn(3, 40, 2)}


def by_rows(weights: Weights, ranks: int) -> dict[str, list[Slice | None]]:
    return {
        name: split(tensor.shape[0], [tensor.shape[0] * r // ranks for r in range(1, ranks)], 0)
        for name, tensor in weights.items()
    }


def test_a_joined_version_has_the_samples_and_casts_of_one_host() -> None:
    weights, alone, cluster = (
        whole_weights(),
        ArenaWriter(BUCKET_BYTES, 3, torch.bfloat16),
        Cluster((2, 1), torch.bfloat16),
    )
    try:
        manifest = await_manifest(alone.gather(0, weights.items()), HANG_S)
        ticket = cluster.gather(0, weights, by_rows(weights, 3))
        assert ticket.num_bytes >= sum(t.numel() * 2 for t in weights.values())

        async def main() -> Manifest:
            memory = HostMemory("consumer")
            try:
                return await memory.fetch(mapped(ticket), this_process("a test"))
            finally:
                await memory.close()

        found = asyncio.run(main())
        assert found.tensors == manifest.tensors and found.samples == manifest.samples
        assert [b.nbytes for b in found.buckets] == [b.nbytes for b in manifest.buckets]
        assert [b.xxh3 for b in found.buckets] != [] and found.adapter is None
    finally:
        alone.close()
        cluster.close()


def test_no_host_holds_what_other_hosts_hold() -> None:
    weights, cluster = {"a": torch.randn(64, 64)}, Cluster((1, 1))
    try:
        ticket = cluster.gather(0, weights, by_rows(weights, 2))
        sizes = [
            sum(bucket.nbytes for bucket in await_announcement(share, HANG_S).buckets)
            for share in ticket.shares
        ]
        assert sizes == [64 * 64 * 2] * 2 and ticket.num_bytes == sum(sizes)
        with pytest.raises(WeightSyncError, match="v0 is spread over several training hosts"):
            await_manifest(ticket.shares[0], HANG_S)
    finally:
        cluster.close()


@pytest.fixture
def shares() -> list[Share]:
    weights, cluster = whole_weights(), Cluster((1, 1))
    try:
        ticket = cluster.gather(0, weights, by_rows(weights, 2))
        found = [await_announcement(share, HANG_S) for share in ticket.shares]
        assert all(decode_announcement(encode(share)) == share for share in found)
        return [share for share in found if isinstance(share, Share)]
    finally:
        cluster.close()


def changed(share: Share, **values: Any) -> Share:
    return msgspec.structs.replace(share, **values)


def test_shares_that_do_not_form_a_version_are_refused(shares: list[Share]) -> None:
    first, second = shares
    landing_of(shares)
    block = second.blocks[0]
    for wrong, message in [
        ([first], "do not hold each element of a once"),
        ([first, first], "do not hold each element of a once"),
        ([first, changed(second, version=1)], "announced different tensors"),
        ([first, changed(second, adapter="{}")], "announced different tensors"),
        ([first, Manifest(version=0, tensors=(), buckets=(), samples=())], "announced different tensors"),
        (
            [Manifest(version=0, tensors=(), buckets=(), samples=()), first],
            "complete on one host and has more",
        ),
        ([first, changed(second, samples=second.samples[1:])], "sample of a is incomplete"),
    ]:
        with pytest.raises(WeightSyncError, match=message):
            landing_of(wrong)  # type: ignore[arg-type]
    for wrong_block in (
        msgspec.structs.replace(block, tensor=9),
        msgspec.structs.replace(block, bucket=9),
        msgspec.structs.replace(block, offset=1 << 20),
        msgspec.structs.replace(block, start=(4, 0)),
        msgspec.structs.replace(block, nbytes=block.nbytes - 4),
        msgspec.structs.replace(block, shape=block.shape[:1]),
    ):
        with pytest.raises(WeightSyncError, match="a block of a training host does not fit its tensor"):
            landing_of([first, changed(second, blocks=(wrong_block, *second.blocks[1:]))])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dtype": "float99"}, "b cannot have 16 bytes as float99"),
        ({"dtype": "__name__"}, "b cannot have 16 bytes as __name__"),
        ({"nbytes": 1 << 50}, f"b cannot have {1 << 50} bytes as float32"),
        ({"nbytes": -16}, "b cannot have -16 bytes as float32"),
        ({"offset": 1 << 50}, "b is not behind its predecessor"),
        ({"offset": -64}, "b is not behind its predecessor"),
        ({"bucket": 10**7}, "b is not behind its predecessor"),
        ({"bucket": -1, "offset": 0}, "b is not behind its predecessor"),
    ],
)
def test_tensors_that_cannot_be_in_a_joined_copy_are_refused(
    shares: list[Share], wrong: dict[str, Any], message: str
) -> None:
    a, b, *others = shares[0].tensors
    tensors = (a, msgspec.structs.replace(b, **wrong), *others)
    with pytest.raises(WeightSyncError, match=message):
        landing_of([changed(share, tensors=tensors) for share in shares])


def test_a_block_that_is_joined_in_a_wrong_place_is_noticed() -> None:
    """Two blocks of equal size are exchanged: the checksums are right, the tensor is not."""
    weights, cluster = {"a": torch.randn(64, 64)}, Cluster((1, 1))

    class Exchanged(Mapped):
        async def announced(self) -> Any:
            found = await super().announced()
            assert isinstance(found, Share)
            (block,) = found.blocks
            return changed(found, blocks=(msgspec.structs.replace(block, start=(32 - block.start[0], 0)),))

    async def main(ticket: WeightTicket) -> None:
        memory, reader = HostMemory("consumer"), ArenaReader()
        try:
            transports = [Exchanged(reader, share, HANG_S) for share in ticket.shares]
            await memory.fetch(VersionRequest(ticket, transports, HANG_S), this_process("a test"))
        finally:
            await memory.close()

    try:
        ticket = cluster.gather(0, weights, by_rows(weights, 2))
        with pytest.raises(WeightSyncError, match="v0: a was not joined correctly"):
            asyncio.run(main(ticket))
    finally:
        cluster.close()
