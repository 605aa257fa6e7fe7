# SPDX-License-Identifier: Apache-2.0
"""Blocking calls have a deadline, and the error names the call."""

from __future__ import annotations

import asyncio
import threading

import pytest

from recipe.async_pipeline.errors import WaitTimeout
from recipe.async_pipeline.verl_bridge.trainer.calls import BlockingCalls
from tests import HANG_S


def test_results_and_errors_are_passed_on() -> None:
    calls = BlockingCalls(60.0)
    assert asyncio.run(calls(divmod, 7, 2)) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(calls(divmod, 7, 0))
    assert calls.submit(int, "3").result(HANG_S) == 3
    calls.close()


async def test_a_timeout_names_the_call() -> None:
    calls, over = BlockingCalls(0.01), threading.Event()

    with pytest.raises(WaitTimeout, match="the call wait to return"):
        try:
            await calls(over.wait)
        finally:
            over.set()
    calls.close()
