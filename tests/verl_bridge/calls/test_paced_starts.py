# SPDX-License-Identifier: Apache-2.0
"""Calls that arrive together begin in order, a few per turn of the event loop."""

from __future__ import annotations

import asyncio

import pytest

from recipe.async_pipeline.verl_bridge.calls.control_calls import PacedStarts

pytestmark = pytest.mark.real_engine


async def begun_by_turn(
    calls: int, per_turn: int, cancelled: frozenset[int] = frozenset()
) -> list[list[int]]:
    """Start calls together; return which of them began in each turn of the event loop, up to the last one."""
    paced, begun = PacedStarts(per_turn), list[int]()

    async def call(number: int) -> None:
        await paced.turn()
        begun.append(number)

    tasks = [asyncio.create_task(call(number)) for number in range(calls)]
    turns: list[list[int]] = []
    seen = 0
    while seen + len(cancelled) < calls:
        await asyncio.sleep(0)
        if not turns:
            for number in cancelled:
                tasks[number].cancel()
        turns.append(begun[seen:])
        seen = len(begun)
    await asyncio.gather(*tasks, return_exceptions=True)
    return turns


def test_calls_begin_in_order_and_a_few_per_turn() -> None:
    turns = asyncio.run(begun_by_turn(23, 4))
    assert [number for turn in turns for number in turn] == list(range(23))
    assert max(map(len, turns)) == 4
    assert len(turns) <= 23 // 4 + 3


def test_a_call_alone_begins_at_once() -> None:
    assert asyncio.run(begun_by_turn(1, 4)) == [[0]]


def test_a_cancelled_call_takes_no_place() -> None:
    turns = asyncio.run(begun_by_turn(20, 4, frozenset(range(4, 12))))
    assert [number for turn in turns for number in turn] == [*range(4), *range(12, 20)]
    assert len(turns) <= 12 // 4 + 3


async def test_a_call_of_another_kind_runs_in_between() -> None:
    paced, begun = PacedStarts(4), list[int]()

    async def call(number: int) -> None:
        await paced.turn()
        begun.append(number)

    tasks = [asyncio.create_task(call(number)) for number in range(1000)]
    await asyncio.sleep(0)
    done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(lambda: done.set_result(len(begun)))
    before = await done
    await asyncio.gather(*tasks)
    assert before <= 12
