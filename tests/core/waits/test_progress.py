# SPDX-License-Identifier: Apache-2.0
"""Work may take any time while it progresses, and so may what waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest

from recipe.async_pipeline.core.waits.deadline import within
from recipe.async_pipeline.core.waits.progress import TELL_S, Excused, while_it_progresses
from recipe.async_pipeline.errors import WaitTimeout
from tests.fakes.virtual_time import forever, now

pytestmark = pytest.mark.virtual_time


class Work:
    """Adds a byte every `every_s` seconds until it has `size` bytes."""

    def __init__(self, size: int, every_s: float, stuck_at: int | None = None) -> None:
        self.bytes, self._size, self._every_s, self._stuck_at = 0, size, every_s, stuck_at
        self.cancelled = False
        self.told: list[tuple[int, float]] = []

    async def run(self) -> str:
        try:
            while self.bytes < self._size:
                await (forever() if self.bytes == self._stuck_at else asyncio.sleep(self._every_s))
                self.bytes += 1
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        return "written"

    async def count(self) -> int:
        return self.bytes

    def watched(self, stall_s: float | None) -> Awaitable[str]:
        return while_it_progresses(
            self.run(),
            self.count,
            stall_s,
            owner="train",
            what="the next byte of x",
            tell=lambda count, seconds: self.told.append((count, seconds)),
        )


@pytest.mark.parametrize("stall_s", [None, 20.0])
async def test_work_that_progresses_may_take_any_time(stall_s: float | None) -> None:
    work = Work(1000, every_s=10.0)
    assert await work.watched(stall_s) == "written"
    assert now() == 10_000.0
    assert len(work.told) == pytest.approx(10_000 / TELL_S, abs=50)
    assert all(count == pytest.approx(seconds / 10, abs=1) for count, seconds in work.told)


async def test_work_that_is_stuck_ends_with_its_last_count() -> None:
    work = Work(1000, every_s=10.0, stuck_at=7)
    with pytest.raises(
        WaitTimeout, match="train waited 300 s for the next byte of x; nothing has been added to 7 bytes"
    ):
        await work.watched(300.0)
    assert now() == pytest.approx(70 + 300, abs=10)
    assert work.cancelled


async def test_cancelling_the_caller_cancels_the_work() -> None:
    work = Work(1000, every_s=10.0)
    task = asyncio.ensure_future(work.watched(300.0))
    await asyncio.sleep(25)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert work.cancelled


async def test_an_error_of_the_work_is_passed_on() -> None:
    async def fail() -> None:
        await asyncio.sleep(3)
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        await while_it_progresses(
            fail(), Work(1, 1.0).count, 10.0, owner="train", what="x", tell=lambda count, seconds: None
        )


async def test_excused_seconds_extend_a_deadline() -> None:
    excused = Excused()

    async def save(after_s: float, seconds: float) -> None:
        await asyncio.sleep(after_s)
        with excused.block(), excused.block():
            await asyncio.sleep(seconds)

    saves = [asyncio.create_task(save(*span)) for span in ((5, 100), (108, 50), (1000, 1))]
    wait = within(forever(), 10.0, owner="logp", what="a lease", excused_s=excused.seconds)
    with pytest.raises(WaitTimeout, match="logp waited 10 s for a lease"):
        await wait
    assert now() == pytest.approx(10 + 150)
    assert excused.seconds() == 150
    await asyncio.gather(*saves)
    assert excused.seconds() == 151
