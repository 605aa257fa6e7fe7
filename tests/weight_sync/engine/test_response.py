# SPDX-License-Identifier: Apache-2.0
"""Attempts wait at a closed gate, and pass in the order in which their requests came."""

from __future__ import annotations

import asyncio

import pytest

from recipe.async_pipeline.weight_sync.engine.response import AttemptGate

pytestmark = pytest.mark.virtual_time


async def test_the_first_request_passes_first_even_if_it_reaches_the_gate_last() -> None:
    gate, passed = AttemptGate(), []

    async def attempt(arrival: int) -> None:
        await gate.passed(arrival)
        passed.append(arrival)

    first, second, given_up, third = (gate.arrive() for _ in range(4))
    await attempt(first)
    gate.close()
    # The first one was rejected by an engine that was paused, after the others had reached the gate.
    waiting = {}
    for arrival in (third, given_up, second, first):
        waiting[arrival] = asyncio.create_task(attempt(arrival))
        await asyncio.sleep(0)
    waiting.pop(given_up).cancel()
    await asyncio.sleep(1)
    assert passed == [first], "none passes a closed gate"
    gate.open()
    await asyncio.gather(*waiting.values())
    assert passed == [first, first, second, third]


async def test_a_pause_that_overtook_an_attempt_is_counted() -> None:
    gate = AttemptGate()

    before = await gate.passed(gate.arrive())
    assert gate.closings == before
    gate.close()
    gate.open()
    assert gate.closings > before == 0
