# SPDX-License-Identifier: Apache-2.0
"""Bounded, closeable, lossless, first in first out: for every schedule and every cancellation."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from recipe.async_pipeline.core.channel import Channel
from recipe.async_pipeline.core.waits.clock import VirtualTimeLoop
from recipe.async_pipeline.core.waits.deadline import within
from recipe.async_pipeline.errors import ChannelClosed, WaitTimeout

pytestmark = pytest.mark.virtual_time


async def settle() -> None:
    """Let everything run that can."""
    await asyncio.sleep(1)


@pytest.mark.parametrize(("capacity", "producers", "wrong"), [(0, 1, "capacity"), (1, 0, "producers")])
def test_a_channel_needs_room_and_a_producer(capacity: int, producers: int, wrong: str) -> None:
    with pytest.raises(ValueError, match=f"'edge': {wrong} must be >= 1, got 0"):
        Channel[int]("edge", capacity, producers)


async def test_it_reports_itself() -> None:
    channel = Channel[str]("generate->rollout", 3)
    assert (channel.name, channel.capacity, channel.closed) == ("generate->rollout", 3, False)
    assert len(channel) == 0
    assert channel, "an empty channel is a channel"
    await channel.send("a")
    await channel.send("b")
    assert await channel.receive() == "a"
    assert len(channel) == 1


async def test_none_and_falsy_items_are_ordinary_items() -> None:
    channel = Channel[object]("edge", 4)
    for item in (None, 0, ""):
        await channel.send(item)
    channel.close()
    assert [item async for item in channel] == [None, 0, ""]


async def test_a_closed_channel_takes_nothing_and_gives_what_it_has() -> None:
    channel = Channel[int]("edge", 2)
    await channel.send(1)
    channel.close()
    assert channel.closed
    with pytest.raises(ChannelClosed, match="'edge' is closed; nothing more can be sent"):
        await channel.send(2)
    assert await channel.receive() == 1
    with pytest.raises(ChannelClosed, match="'edge' is closed and drained"):
        await channel.receive()


async def test_it_closes_when_the_last_producer_closes() -> None:
    channel = Channel[int]("edge", 1, producers=2)
    receiver = asyncio.create_task(channel.receive())
    channel.close()
    await settle()
    assert not channel.closed
    assert not receiver.done()
    channel.close()
    with pytest.raises(ChannelClosed):
        await receiver
    with pytest.raises(ChannelClosed, match="each of its 2 producers closed it before"):
        channel.close()


async def test_every_waiting_receiver_learns_of_the_end() -> None:
    channel = Channel[int]("edge", 1)

    async def consume() -> list[int]:
        return [item async for item in channel]

    consumers = [asyncio.create_task(consume()) for _ in range(3)]
    await settle()
    await channel.send(7)
    channel.close()
    assert [await consumer for consumer in consumers] == [[7], [], []]


async def test_abort_frees_senders_and_receivers_and_keeps_what_is_inside() -> None:
    channel = Channel[int]("edge", 1, producers=3)
    await channel.send(1)
    senders = [asyncio.create_task(channel.send(n)) for n in (2, 3)]
    await settle()
    channel.abort()
    for sender in senders:
        with pytest.raises(ChannelClosed):
            await sender
    assert [item async for item in channel] == [1]
    channel.abort()  # again does no harm
    for _ in range(3):
        channel.close()  # nor does a producer that only now learns of it
    with pytest.raises(ChannelClosed, match="each of its 3"):
        channel.close()


@pytest.mark.parametrize("item_first", [True, False])
async def test_a_bounded_receive_that_expires_as_the_item_arrives_loses_nothing(item_first: bool) -> None:
    channel = Channel[int]("edge", 1)
    loop = asyncio.get_running_loop()

    def put() -> None:
        with pytest.raises(StopIteration):  # there is room, so it is sent without a suspension
            channel.send(7).send(None)

    if item_first:
        loop.call_at(1, put)
    bounded = asyncio.create_task(within(channel.receive(), 1, owner="train", what="an item"))
    await asyncio.sleep(0)
    if not item_first:
        loop.call_at(1, put)
    with pytest.raises(WaitTimeout):
        await bounded
    assert await channel.receive() == 7


class AnyScheduleOfAChannel(RuleBasedStateMachine):
    """Sends, receives, cancellations and the end, interleaved at the grain of one turn of the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualTimeLoop()
        self.channel = Channel[int]("edge", 2)
        self.senders: list[asyncio.Task[None]] = []
        self.receivers: list[asyncio.Task[None]] = []
        self.sent: list[int] = []
        self.received: list[int] = []
        self.received_by: list[int] = []

    async def send(self, number: int) -> None:
        await self.channel.send(number)
        self.sent.append(number)

    async def receive(self, number: int) -> None:
        self.received.append(await self.channel.receive())
        self.received_by.append(number)

    @rule()
    def start_a_send(self) -> None:
        self.senders.append(self.loop.create_task(self.send(len(self.senders))))

    @rule()
    def start_a_receive(self) -> None:
        self.receivers.append(self.loop.create_task(self.receive(len(self.receivers))))

    @rule(data=st.data(), kind=st.sampled_from(["senders", "receivers"]))
    def cancel_one(self, data: st.DataObject, kind: str) -> None:
        pending = [task for task in getattr(self, kind) if not task.done()]
        if pending:
            data.draw(st.sampled_from(pending), label=kind).cancel()

    @rule()
    def one_turn_of_the_loop(self) -> None:
        self.loop.run_until_complete(asyncio.sleep(0))

    @rule()
    def run_until_all_wait(self) -> None:
        self.loop.run_until_complete(asyncio.sleep(1))
        waiting_to_send = [task for task in self.senders if not task.done()]
        waiting_to_receive = [task for task in self.receivers if not task.done()]
        assert not waiting_to_send or (len(self.channel) == self.channel.capacity and not self.channel.closed)
        assert not waiting_to_receive or (len(self.channel) == 0 and not self.channel.closed)

    @rule(weight=st.integers(0, 5))
    def abort(self, weight: int) -> None:
        if weight == 5:  # rarely, or little else would be seen
            self.channel.abort()

    @invariant()
    def the_bound_holds(self) -> None:
        assert len(self.channel) <= self.channel.capacity

    @invariant()
    def nothing_is_lost_doubled_or_reordered(self) -> None:
        assert self.received == self.sent[: len(self.received)]
        assert len(self.channel) == len(self.sent) - len(self.received)

    @invariant()
    def no_waiter_is_overtaken(self) -> None:
        assert self.sent == sorted(self.sent)
        assert self.received_by == sorted(self.received_by)

    @invariant()
    def a_send_that_was_cancelled_or_refused_did_not_happen(self) -> None:
        for number, task in enumerate(self.senders):
            if task.done():
                happened = not task.cancelled() and task.exception() is None
                assert happened == (number in self.sent)

    def teardown(self) -> None:
        self.run_until_all_wait()
        self.channel.abort()
        self.run_until_all_wait()
        for task in self.senders + self.receivers:
            if not task.cancelled():
                assert task.exception() is None or isinstance(task.exception(), ChannelClosed)
        self.loop.close()


TestAnyScheduleOfAChannel = AnyScheduleOfAChannel.TestCase
TestAnyScheduleOfAChannel.settings = settings(max_examples=100, stateful_step_count=40)
