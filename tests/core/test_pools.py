# SPDX-License-Identifier: Apache-2.0
"""Leases: never more than slots, first come first served, nothing lost to a cancellation."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from recipe.async_pipeline.core.pools import DevicePool, Lease, PoolSet
from recipe.async_pipeline.core.waits.clock import VirtualTimeLoop
from recipe.async_pipeline.core.waits.deadline import within
from recipe.async_pipeline.errors import LeaseError, WaitTimeout

pytestmark = pytest.mark.virtual_time


async def settle() -> None:
    """Let everything run that can."""
    await asyncio.sleep(1)


@pytest.mark.parametrize(("devices", "slots", "wrong"), [(-1, 1, "devices"), (1, 0, "slots")])
def test_a_pool_needs_a_slot(devices: int, slots: int, wrong: str) -> None:
    with pytest.raises(ValueError, match=f"'train': {wrong} must be"):
        DevicePool("train", devices, slots)


async def test_a_lease_tells_its_pool_owner_number_and_beginning() -> None:
    pool = DevicePool("train", 4, slots=2)
    first = await pool.acquire("logp")
    await asyncio.sleep(3)
    second = await pool.acquire("train")
    assert first == Lease(pool="train", owner="logp", number=1, since=0)
    assert second == Lease(pool="train", owner="train", number=2, since=3)
    assert pool.holders == ("logp", "train")
    assert (pool.name, pool.devices, pool.slots) == ("train", 4, 2)


async def test_an_exclusive_pool_serialises_and_serves_in_order() -> None:
    pool = DevicePool("train", 1)
    began: list[tuple[str, float]] = []

    async def work(owner: str, work_s: float) -> None:
        lease = await pool.acquire(owner)
        began.append((owner, lease.since))
        await asyncio.sleep(work_s)
        pool.release(lease)

    await asyncio.gather(work("logp", 2), work("train", 5), work("param_update", 1))
    assert pool.holders == ()
    assert began == [("logp", 0), ("train", 2), ("param_update", 7)]


async def test_a_lease_is_released_once() -> None:
    pool = DevicePool("train", 1)
    lease = await pool.acquire("logp")
    pool.release(lease)
    with pytest.raises(LeaseError, match="logp returned lease 1 on pool 'train', which is not out"):
        pool.release(lease)


async def test_a_lease_of_another_pool_is_refused_and_frees_nothing() -> None:
    train, rollout, namesake = DevicePool("train", 1), DevicePool("rollout", 1), DevicePool("train", 1)
    held = await train.acquire("logp")
    with pytest.raises(LeaseError, match="generate returned a lease on pool 'rollout' to pool 'train'"):
        train.release(await rollout.acquire("generate"))
    with pytest.raises(LeaseError, match="not issued by this pool"):
        train.release(await namesake.acquire("logp"))
    assert train.holders == ("logp",)
    train.release(held)


async def test_it_says_who_holds_it_for_how_long_and_who_waits() -> None:
    pool = DevicePool("train", 1)
    assert pool.describe() == "train: free"
    await pool.acquire("logp")
    waiters = [asyncio.create_task(pool.acquire(owner)) for owner in ("train", "param_update")]
    await asyncio.sleep(3.2)
    assert pool.describe() == "train: held by logp since 3.2 s; waiting: train, param_update"
    for waiter in waiters:
        waiter.cancel()
    await asyncio.wait(waiters)
    assert pool.describe() == "train: held by logp since 3.2 s"

    shared = DevicePool("rollout", 2, slots=2)
    await shared.acquire("generate")
    await asyncio.sleep(1)
    await shared.acquire("validation")
    assert shared.describe() == "rollout: held by generate since 1.0 s, validation since 0.0 s"


async def test_a_bounded_wait_for_a_lease_names_the_holder_and_leaves_no_trace() -> None:
    pool = DevicePool("train", 1)
    held = await pool.acquire("logp")
    with pytest.raises(WaitTimeout) as caught:
        await within(pool.acquire("train"), 5, owner="train", what="a lease", holder=pool.describe)
    assert str(caught.value) == (
        "train waited 5 s for a lease; train: held by logp since 5.0 s; waiting: train"
    )
    assert pool.describe() == "train: held by logp since 5.0 s"
    pool.release(held)
    assert (await pool.acquire("param_update")).number == 2


def test_pools_are_found_by_name() -> None:
    train, rollout = DevicePool("train", 1), DevicePool("rollout", 1)
    pools = PoolSet({"train": train, "rollout": rollout})
    assert pools.get("rollout") is rollout
    assert list(pools) == ["train", "rollout"]
    assert len(pools) == 2
    assert "train" in pools
    assert "logp" not in pools
    with pytest.raises(LeaseError, match="there is no pool 'logp'; known pools: train, rollout"):
        pools.get("logp")
    with pytest.raises(LeaseError, match="known pools: none"):
        PoolSet({}).get("logp")


class AnyScheduleOfAPool(RuleBasedStateMachine):
    """Requests, releases and cancellations, interleaved at the grain of one turn of the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualTimeLoop()
        self.pool = DevicePool("train", 1, slots=2)
        self.requests: list[asyncio.Task[None]] = []
        self.out: list[Lease] = []
        self.granted: list[int] = []

    async def acquire(self, number: int) -> None:
        lease = await self.pool.acquire(str(number))
        self.out.append(lease)
        self.granted.append(number)

    @rule()
    def ask(self) -> None:
        self.requests.append(self.loop.create_task(self.acquire(len(self.requests))))

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.out:
            lease = self.out.pop(data.draw(st.integers(0, len(self.out) - 1)))
            self.loop.call_soon(self.pool.release, lease)
            self.loop.run_until_complete(asyncio.sleep(0))

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        pending = [task for task in self.requests if not task.done()]
        if pending:
            data.draw(st.sampled_from(pending)).cancel()

    @rule()
    def one_turn_of_the_loop(self) -> None:
        self.loop.run_until_complete(asyncio.sleep(0))

    @rule()
    def run_until_all_wait(self) -> None:
        self.loop.run_until_complete(asyncio.sleep(1))
        pending = [task for task in self.requests if not task.done()]
        assert not pending or len(self.pool.holders) == self.pool.slots

    @invariant()
    def the_pool_and_the_owners_agree(self) -> None:
        assert len(self.out) <= self.pool.slots
        assert self.pool.holders == tuple(lease.owner for lease in self.out)

    @invariant()
    def no_waiter_is_overtaken(self) -> None:
        assert self.granted == sorted(self.granted)

    def teardown(self) -> None:
        for task in self.requests:
            task.cancel()
        self.loop.run_until_complete(asyncio.sleep(1))
        for lease in self.out:
            self.pool.release(lease)
        assert self.pool.holders == ()
        self.loop.close()


TestAnyScheduleOfAPool = AnyScheduleOfAPool.TestCase
TestAnyScheduleOfAPool.settings = settings(max_examples=60, stateful_step_count=40)
