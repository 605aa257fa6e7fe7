# SPDX-License-Identifier: Apache-2.0
"""A consumer prepares the newest version that it was offered, once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from recipe.async_pipeline.errors import CorruptionError, WeightSyncError
from recipe.async_pipeline.weight_sync.fleet.preparation import Preparation, to_the_end
from tests import HANG_S

pytestmark = pytest.mark.virtual_time

Work = Callable[[], Coroutine[Any, Any, str]]


class Works:
    """Preparations of ten seconds, with a log."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def of(self, version: int, error: Exception | None = None, cleanup_s: float = 0.0) -> Work:
        async def work() -> str:
            self.log.append(f"{version} begins")
            try:
                await asyncio.sleep(10)
            except asyncio.CancelledError:
                await asyncio.sleep(cleanup_s)
                self.log.append(f"{version} ends early")
                raise
            if error is not None:
                raise error
            self.log.append(f"{version} is ready")
            return f"v{version}"

        return work


async def test_what_is_prepared_can_be_taken_until_it_is_dropped() -> None:
    one, works = Preparation[str]("replica 0"), Works()
    refused = "replica 0 cannot load v4, which it has not prepared; prepare it first"
    with pytest.raises(WeightSyncError, match=refused):
        one.prepared(4)
    preparing = asyncio.create_task(one.prepare(4, works.of(4)))
    await asyncio.sleep(5)
    with pytest.raises(WeightSyncError, match=refused):
        one.prepared(4)
    await preparing
    assert one.prepared(4) == one.prepared(4) == "v4"
    with pytest.raises(WeightSyncError, match="load v3, which it has not prepared"):
        one.prepared(3)
    one.drop()
    with pytest.raises(WeightSyncError, match=refused):
        one.prepared(4)


async def test_a_version_is_prepared_once_for_two_calls() -> None:
    one, works = Preparation[str]("replica 0"), Works()
    await asyncio.gather(one.prepare(4, works.of(4)), one.prepare(4, works.of(4)))
    await one.prepare(4, works.of(4))
    assert works.log == ["4 begins", "4 is ready"]


async def test_a_newer_version_takes_the_place_of_an_older_one_once_that_has_ended() -> None:
    one, works = Preparation[str]("replica 0"), Works()
    older = asyncio.create_task(one.prepare(4, works.of(4, cleanup_s=3.0)))
    await asyncio.sleep(1)
    await one.prepare(5, works.of(5))
    with pytest.raises(WeightSyncError, match="v4 was replaced by v5 during its preparation"):
        await older
    assert works.log == ["4 begins", "4 ends early", "5 begins", "5 is ready"]
    assert asyncio.get_running_loop().time() == 14
    assert one.prepared(5) == "v5"
    with pytest.raises(WeightSyncError, match="replica 0 prepares v5 and was offered v4"):
        await one.prepare(4, works.of(4))


async def test_a_prepared_version_that_was_never_committed_is_replaced() -> None:
    one, works = Preparation[str]("replica 0"), Works()
    await one.prepare(4, works.of(4))
    preparing = asyncio.create_task(one.prepare(5, works.of(5)))
    await asyncio.sleep(1)
    with pytest.raises(WeightSyncError, match="load v4, which it has not prepared"):
        one.prepared(4)
    await preparing
    assert one.prepared(5) == "v5"


async def test_a_preparation_outlives_a_caller_that_is_gone() -> None:
    one, works = Preparation[str]("replica 0"), Works()
    caller = asyncio.create_task(one.prepare(4, works.of(4)))
    await asyncio.sleep(1)
    caller.cancel()
    await one.prepare(4, works.of(4))
    assert works.log == ["4 begins", "4 is ready"]


async def test_a_preparation_that_failed_can_be_repeated() -> None:
    one, works = Preparation[str]("replica 0"), Works()
    with pytest.raises(CorruptionError, match="bucket 1"):
        await one.prepare(4, works.of(4, CorruptionError("bucket 1")))
    with pytest.raises(WeightSyncError, match="load v4, which it has not prepared"):
        one.prepared(4)
    await one.prepare(4, works.of(4))
    assert one.prepared(4) == "v4"


def test_a_thread_is_waited_for_although_its_caller_is_cancelled() -> None:
    go, log = threading.Event(), []

    def work() -> int:
        assert go.wait(HANG_S)
        log.append("the thread ends")
        return 7

    async def scenario() -> None:
        running = asyncio.create_task(to_the_end(work))
        await asyncio.sleep(0)
        for _ in range(3):
            running.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not running.done()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert log == ["the thread ends"]
        assert await to_the_end(work) == 7

    asyncio.run(scenario())
