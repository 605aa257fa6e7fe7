# SPDX-License-Identifier: Apache-2.0
"""Engines: responses share them, and nothing is lost when responses are given up or a replica dies."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.async_pipeline.core.waits.clock import run_virtual
from recipe.async_pipeline.tools.plan.profile import Decode
from recipe.async_pipeline.tools.plan.simulated.draws import ResponseCost
from recipe.async_pipeline.tools.plan.simulated.replica_pool import ReplicaPool

pytestmark = pytest.mark.virtual_time

SLOWER = Decode(concurrency=(1, 2, 4), token_s=(1.0, 1.5, 2.0), slots=4)


def cost(
    tokens: int, *, turns: int = 1, tool_s: float = 0.0, reward_s: float = 0.0, prompt: float = 0.0
) -> ResponseCost:
    return ResponseCost(prompt, (tokens,) * turns, (tool_s,) * (turns - 1), reward_s, tokens * turns)


def timed(
    pool: Callable[[], ReplicaPool],
    *asks: tuple[float, list[ResponseCost]],
    meanwhile: Callable[[ReplicaPool], Awaitable[Any]] | None = None,
) -> list[float]:
    """Return when each group was done; each is requested at its time."""

    async def run() -> list[float]:
        engines = pool()
        loop = asyncio.get_running_loop()

        async def ask(at: float, costs: list[ResponseCost]) -> float:
            await asyncio.sleep(at)
            await engines.generate(costs)
            return loop.time()

        other = asyncio.ensure_future(meanwhile(engines)) if meanwhile else None
        done = await asyncio.gather(*(ask(at, costs) for at, costs in asks))
        if other is not None:
            await other
        assert all(r.running == 0 and r.open == 0 for r in engines.replicas), "no request is left open"
        return done

    return run_virtual(run())


def test_two_responses_share_an_engine() -> None:
    # Alone until 2 (2 tokens), then together at 1.5 s per token: the first needs 2 more tokens, until 5; the
    # second has 2 of its 3 by then.
    assert timed(lambda: ReplicaPool(1, SLOWER), (0, [cost(4)]), (2, [cost(3)])) == pytest.approx([5.0, 6.0])


def test_a_group_is_done_with_its_last_score() -> None:
    assert timed(lambda: ReplicaPool(2, SLOWER), (0, [cost(1, reward_s=9.0), cost(5)])) == pytest.approx(
        [10.0]
    )


def test_requests_go_to_the_least_busy_replica() -> None:
    assert timed(lambda: ReplicaPool(3, SLOWER), *((0, [cost(4)]) for _ in range(3))) == pytest.approx(
        [4.0] * 3
    )


def test_requests_without_a_slot_wait_in_order() -> None:
    one_slot = Decode(token_s=(1.0,), slots=1)
    assert timed(
        lambda: ReplicaPool(1, one_slot), (0, [cost(3)]), (1, [cost(2)]), (2, [cost(1)])
    ) == pytest.approx([3.0, 5.0, 6.0])


def test_reading_a_prompt_delays_other_responses() -> None:
    reading = Decode(token_s=(1.0,), prefill_token_s=0.5, slots=4)
    assert timed(
        lambda: ReplicaPool(1, reading), (0, [cost(3)]), (1, [cost(1, prompt=4.0)])
    ) == pytest.approx([5.0, 4.0])


def test_tools_run_between_turns_and_later_turns_stay_on_the_replica() -> None:
    assert timed(lambda: ReplicaPool(1, SLOWER, 0.0), (0, [cost(2, turns=2, tool_s=3.0)])) == pytest.approx(
        [7.0]
    )


def test_a_stalled_replica_makes_no_step() -> None:
    async def stall(pool: ReplicaPool) -> None:
        await asyncio.sleep(1.0)
        pool.stall(pool.replicas[0], 2.5)

    assert timed(lambda: ReplicaPool(1, SLOWER), (0, [cost(4)]), meanwhile=stall) == pytest.approx([6.5])


def test_responses_of_a_dead_replica_restart_on_another() -> None:
    async def fail(pool: ReplicaPool) -> None:
        await asyncio.sleep(3.0)
        pool.fail(pool.replicas[0])
        pool.fail(pool.replicas[0])  # no effect: it has failed already
        await asyncio.sleep(10.0)
        pool.revive(pool.replicas[0], 7)

    assert timed(
        lambda: ReplicaPool(2, SLOWER), (0, [cost(4)]), (0.5, [cost(8)]), meanwhile=fail
    ) == pytest.approx([9.0, 10.75], abs=3)


def test_without_a_replica_requests_wait_for_one() -> None:
    async def fail(pool: ReplicaPool) -> None:
        await asyncio.sleep(1.0)
        pool.fail(pool.replicas[0])
        await asyncio.sleep(4.0)
        pool.revive(pool.replicas[0], 1)

    assert timed(
        lambda: ReplicaPool(1, SLOWER), (0, [cost(3)]), (2, [cost(3)]), meanwhile=fail
    ) == pytest.approx([9.5, 9.5])


async def test_a_cancelled_group_frees_its_engine() -> None:
    pool = ReplicaPool(1, Decode(concurrency=(1, 2), token_s=(1.0, 2.0), slots=2))
    given_up = asyncio.create_task(pool.generate([cost(100), cost(100, reward_s=5.0)]))
    await asyncio.sleep(1.0)
    queued = asyncio.create_task(pool.generate([cost(4)]))
    await asyncio.sleep(1.0)
    given_up.cancel()
    await queued
    assert pool.replicas[0].open == pool.replicas[0].running == 0
    assert asyncio.get_running_loop().time() == pytest.approx(6.0)


async def test_versions_are_recorded_at_the_first_and_last_token() -> None:
    pool = ReplicaPool(1, SLOWER)
    pool.replicas[0].version = 3
    task = asyncio.create_task(pool.generate([cost(4)]))
    await asyncio.sleep(1.0)
    pool.serve(pool.replicas[0], 5)
    assert await task == [(3, 5, ((3, 0), (5, 1)))]


async def test_what_a_dead_replica_wrote_of_a_turn_has_no_version() -> None:
    pool = ReplicaPool(2, SLOWER)
    pool.replicas[0].version, pool.replicas[1].version = 3, 4
    task = asyncio.create_task(pool.generate([cost(4, turns=2)]))
    await asyncio.sleep(6.0)
    pool.serve(pool.replicas[0], 5)
    pool.fail(pool.replicas[0])
    (served,) = await task
    assert served.spans == ((3, 0), (4, 4)), "the second turn began again on the other replica"


async def test_open_seconds_count_the_time_with_a_request() -> None:
    pool = ReplicaPool(1, SLOWER)
    await asyncio.sleep(2.0)
    await pool.generate([cost(3)])
    await asyncio.sleep(2.0)
    first = pool.take_open_s(pool.replicas[0])
    task = asyncio.create_task(pool.generate([cost(3)]))
    await asyncio.sleep(1.0)
    second = pool.take_open_s(pool.replicas[0])
    await task
    assert [first, second, pool.take_open_s(pool.replicas[0])] == pytest.approx([3.0, 1.0, 2.0])


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(1, 30)), min_size=1, max_size=12))
def test_virtual_time_equals_stepping_through_time(requests: list[tuple[float, int]]) -> None:
    """Compare with small steps of time: each response makes dt / step_s(c) tokens of progress."""
    ends = timed(
        lambda: ReplicaPool(1, Decode(concurrency=(1, 12), token_s=(0.1, 0.4), slots=12)),
        *((at, [cost(n)]) for at, n in requests),
    )
    decode, dt = Decode(concurrency=(1, 12), token_s=(0.1, 0.4), slots=12), 0.005
    left, now, found = [float(n) for _, n in requests], 0.0, [0.0] * len(requests)
    while any(n > 0 for n in left):
        running = [i for i, (at, _) in enumerate(requests) if at <= now and left[i] > 0]
        for i in running:
            left[i] -= dt / decode.step_s(len(running))
            found[i] = now + dt
        now += dt
    assert ends == pytest.approx(found, abs=0.3)
