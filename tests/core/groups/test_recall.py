# SPDX-License-Identifier: Apache-2.0
"""A recall is data: a cancellation is never taken for one, nor one for a cancellation."""

from __future__ import annotations

import asyncio

import pytest

from recipe.async_pipeline.core.groups.recall import Recall
from recipe.async_pipeline.core.waits.clock import run_virtual
from recipe.async_pipeline.errors import StageProtocolError

pytestmark = pytest.mark.virtual_time


async def work(seconds: float, lingers_s: float = 0.0, log: list[str] | None = None) -> str:
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        await asyncio.sleep(lingers_s)
        if log is not None:
            log.append("ended")
        raise
    return "done"


def test_a_recall_is_given_once() -> None:
    recall = Recall()
    recall.give("drop")
    assert recall.verdict == "drop"
    with pytest.raises(StageProtocolError, match="recalled twice: drop, then regenerate"):
        recall.give("regenerate")


def test_subscribers_are_called_when_it_is_given_or_at_once() -> None:
    recall, calls = Recall(), list[str]()
    recall.subscribe(lambda: calls.append("before"))
    recall.give("drop")
    recall.subscribe(lambda: calls.append("after"))
    assert calls == ["before", "after"]


@pytest.mark.parametrize("at_s", [None, 0.0, 1.0, 5.0])
def test_work_is_bound_by_the_recall(at_s: float | None) -> None:
    recall, log = Recall(), list[str]()

    async def main() -> tuple[str | None, float]:
        if at_s is not None:
            asyncio.get_running_loop().call_later(at_s, recall.give, "drop")
        found = await recall.bound(work(3.0, 2.0, log))
        return found, asyncio.get_running_loop().time()

    recalled = at_s is not None and at_s < 3.0
    assert run_virtual(main()) == ((None, (at_s or 0.0) + 2.0) if recalled else ("done", 3.0))
    assert log == (["ended"] if recalled else []), "the work has ended by then"


async def test_a_result_that_comes_in_spite_of_the_recall_is_returned() -> None:
    async def stubborn() -> str:
        try:
            await asyncio.sleep(9)
        except asyncio.CancelledError:
            return "done"
        return "never"

    recall = Recall()

    asyncio.get_running_loop().call_later(1, recall.give, "drop")
    assert await recall.bound(stubborn()) == "done"


def test_an_error_is_passed_on() -> None:
    async def broken() -> str:
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        run_virtual(Recall().bound(broken()))


@pytest.mark.parametrize("recalled", [False, True])
async def test_a_cancellation_is_no_recall(recalled: bool) -> None:
    """Also while the recalled work still cleans up."""
    recall, log = Recall(), list[str]()

    waiting = asyncio.create_task(recall.bound(work(100.0, 10.0, log)))
    await asyncio.sleep(1)
    if recalled:
        recall.give("regenerate")
        await asyncio.sleep(1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert log == ["ended"] or recalled
