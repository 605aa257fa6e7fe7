# SPDX-License-Identifier: Apache-2.0
"""Threads do not wait for ever, and say for what they have waited."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
import ray
from ray.exceptions import GetTimeoutError

from recipe.async_pipeline.errors import WaitTimeout
from recipe.async_pipeline.verl_bridge.ray_calls import got, result_of


def test_an_actor_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(refs: Any, timeout: float) -> Any:
        if refs == "silent":
            raise GetTimeoutError(f"after {timeout}")
        return [refs]

    monkeypatch.setattr(ray, "get", get)
    assert got("ref", 5, owner="the trainer", what="an answer") == ["ref"]
    with pytest.raises(WaitTimeout, match="^the trainer waited 5 s for the balancer to answer$"):
        got("silent", 5, owner="the trainer", what="the balancer to answer")


def test_work_that_is_not_done_in_time() -> None:
    future: Future[int] = Future()
    with pytest.raises(WaitTimeout, match="^the trainer waited 0 s for the servers$"):
        result_of(future, 0, owner="the trainer", what="the servers")
    future.set_result(7)
    assert result_of(future, 0, owner="the trainer", what="the servers") == 7


def test_a_timeout_of_the_work_itself_is_its_own() -> None:
    future: Future[int] = Future()
    future.set_exception(TimeoutError("the engine's"))
    with pytest.raises(TimeoutError, match="the engine's"):
        result_of(future, 0, owner="the trainer", what="the servers")
