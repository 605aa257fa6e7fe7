# SPDX-License-Identifier: Apache-2.0
"""Calls get their own replies, and errors keep their class."""

from __future__ import annotations

import asyncio

import pytest

from recipe.async_pipeline.core.clock import run_virtual
from recipe.async_pipeline.errors import ProofError, WeightSyncError
from recipe.async_pipeline.verl_bridge.rollout.sglang.calls import (
    SchedulerCall,
    SchedulerCalls,
    SchedulerFailure,
    SchedulerReply,
)


def test_replies_reach_their_callers_in_any_order() -> None:
    async def main() -> list[str]:
        sent: list[SchedulerCall] = []
        calls = SchedulerCalls(sent.append)
        asked = [asyncio.create_task(calls.call("method", name)) for name in "ab"]
        await asyncio.sleep(0)
        for call in reversed(sent):
            calls.take(SchedulerReply(call.number, call.arguments[0].upper()))
        return [str(await one) for one in asked]

    assert run_virtual(main()) == ["A", "B"]


def test_a_reply_without_a_caller_is_dropped() -> None:
    async def main() -> str:
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
        return str(await asked)

    assert run_virtual(main()) == "next"


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (ProofError("v3: other values"), ProofError, "^v3: other values$"),
        (KeyError("x"), WeightSyncError, "KeyError: 'x'"),
    ],
)
def test_an_error_of_the_scheduler_is_raised_here(error: Exception, kind: type, message: str) -> None:
    async def main() -> None:
        calls = SchedulerCalls(
            lambda call: calls.take(SchedulerReply(call.number, None, SchedulerFailure.of(error)))
        )
        await calls.call("load")

    with pytest.raises(kind, match=message):
        run_virtual(main())
