# SPDX-License-Identifier: Apache-2.0
"""Calls get their own replies, and errors keep their class."""

from __future__ import annotations

import asyncio

import pytest

from recipe.async_pipeline.errors import ProofError, WeightSyncError
from recipe.async_pipeline.verl_bridge.rollout.sglang.calls import (
    SchedulerCall,
    SchedulerCalls,
    SchedulerFailure,
    SchedulerReply,
)

pytestmark = pytest.mark.virtual_time


async def test_replies_reach_their_callers_in_any_order() -> None:
    sent: list[SchedulerCall] = []
    calls = SchedulerCalls(sent.append)
    asked = [asyncio.create_task(calls.call("method", name)) for name in "ab"]
    await asyncio.sleep(0)
    for call in reversed(sent):
        calls.take(SchedulerReply(call.number, call.arguments[0].upper()))
    assert [str(await one) for one in asked] == ["A", "B"]


async def test_a_reply_without_a_caller_is_dropped() -> None:
    sent: list[SchedulerCall] = []
    calls = SchedulerCalls(sent.append)
    gone = asyncio.create_task(calls.call("slow"))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.sleep(0)
    asked = asyncio.create_task(calls.call("next"))
    await asyncio.sleep(0)
    for call in sent:
        calls.take(SchedulerReply(call.number, call.method))
    assert str(await asked) == "next"


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (ProofError("v3: other values"), ProofError, "^v3: other values$"),
        (KeyError("x"), WeightSyncError, "KeyError: 'x'"),
    ],
)
async def test_an_error_of_the_scheduler_is_raised_here(error: Exception, kind: type, message: str) -> None:
    with pytest.raises(kind, match=message):
        calls = SchedulerCalls(
            lambda call: calls.take(SchedulerReply(call.number, None, SchedulerFailure.of(error)))
        )
        await calls.call("load")
