# SPDX-License-Identifier: Apache-2.0
"""Work in the background ends the run if it fails, and is known until it ends."""

from __future__ import annotations

import asyncio
import inspect

import pytest

from recipe.async_pipeline.core.waits.background import BackgroundWork
from recipe.async_pipeline.errors import StrayCancellation
from tests.fakes.virtual_time import forever

pytestmark = pytest.mark.virtual_time


async def after(seconds: float, error: BaseException | None = None) -> str:
    await asyncio.sleep(seconds)
    if error is not None:
        raise error
    return "done"


async def test_the_result_is_that_of_the_work() -> None:
    failed: list[tuple[str, Exception]] = []
    background = BackgroundWork(lambda role, error: failed.append((role, error)), lambda: False)
    task = background.start("train", after(3.0))
    assert background.tasks == {task}
    assert (await task, failed) == ("done", [])
    await asyncio.sleep(0)
    assert background.tasks == set()


@pytest.mark.parametrize(
    ("error", "kind"), [(OSError("full"), OSError), (asyncio.CancelledError(), StrayCancellation)]
)
async def test_an_error_is_reported_at_once(error: BaseException, kind: type[Exception]) -> None:
    failed: list[tuple[str, Exception]] = []
    background = BackgroundWork(lambda role, error: failed.append((role, error)), lambda: False)
    background.start("train", after(3.0, error))
    await asyncio.sleep(4.0)
    ((role, found),) = failed
    assert role == "train" and isinstance(found, kind)


async def test_a_stop_is_no_error() -> None:
    failed: list[tuple[str, Exception]] = []
    background = BackgroundWork(lambda role, error: failed.append((role, error)), lambda: True)
    task = background.start("train", _never())
    await asyncio.sleep(1.0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() and failed == []


async def _never() -> None:
    await forever()


async def test_work_that_is_stopped_before_it_begins_is_closed() -> None:
    """A coroutine that is neither awaited nor closed is a warning, and warnings are errors."""

    background = BackgroundWork(lambda role, error: None, lambda: True)
    work = after(3.0)
    task = background.start("train", work)
    task.cancel()
    await asyncio.wait([task])
    assert inspect.getcoroutinestate(work) == inspect.CORO_CLOSED
