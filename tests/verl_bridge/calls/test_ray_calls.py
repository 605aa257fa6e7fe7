# SPDX-License-Identifier: Apache-2.0
"""Waits of threads have a deadline, and the error names what they waited for."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import Any

import pytest
import ray
from ray.exceptions import GetTimeoutError

from recipe.async_pipeline.errors import WaitTimeout
from recipe.async_pipeline.verl_bridge.calls.ray_calls import BlockingCalls, got, result_of
from tests import HANG_S


def test_an_actor_that_does_not_respond_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(refs: Any, timeout: float) -> Any:
        if refs == "silent":
            raise GetTimeoutError(f"after {timeout}")
        return [refs]

    monkeypatch.setattr(ray, "get", get)
    assert got("ref", 5, owner="the trainer", what="a response") == ["ref"]
    with pytest.raises(WaitTimeout, match="^the trainer waited 5 s for the balancer to answer$"):
        got("silent", 5, owner="the trainer", what="the balancer to answer")


def test_unfinished_work_is_a_timeout() -> None:
    future: Future[int] = Future()
    with pytest.raises(WaitTimeout, match="^the trainer waited 0 s for the servers$"):
        result_of(future, 0, owner="the trainer", what="the servers")
    future.set_result(7)
    assert result_of(future, 0, owner="the trainer", what="the servers") == 7


def test_a_timeout_error_of_the_work_propagates() -> None:
    future: Future[int] = Future()
    future.set_exception(TimeoutError("the engine's"))
    with pytest.raises(TimeoutError, match="the engine's"):
        result_of(future, 0, owner="the trainer", what="the servers")


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
