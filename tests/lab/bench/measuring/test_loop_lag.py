# SPDX-License-Identifier: Apache-2.0
"""Percentiles of the lag of an event loop."""

from __future__ import annotations

import asyncio
import time

import pytest

from recipe.async_pipeline.lab.bench.measuring.loop_lag import EVERY_S, LagMeter


def test_a_long_block_counts_as_much_as_it_lasts() -> None:
    meter = LagMeter()
    for _ in range(90):
        meter.note(0.0, 0.0)
    # 50 ms are ten samples of 5 ms that an idle loop would have taken.
    meter.note(10 * EVERY_S, 0.0)
    found = meter.summary()
    assert found["p50"] == 0.0
    assert found["p99"] == pytest.approx(9 * EVERY_S)
    assert found["max"] == pytest.approx(10 * EVERY_S)


def test_lag_without_work_of_the_thread_is_not_its_own() -> None:
    meter = LagMeter()
    meter.note(0.030, 0.004)
    assert meter.summary()["max"] == pytest.approx(0.030)
    assert meter.summary()["own_max"] == pytest.approx(0.004)


def test_a_meter_without_samples() -> None:
    assert set(LagMeter().summary().values()) == {0.0}


def test_a_blocked_loop_is_noticed() -> None:
    async def run() -> LagMeter:
        meter = LagMeter()
        task = asyncio.create_task(meter.run())
        await asyncio.sleep(0)
        ended = time.thread_time() + 0.05
        while time.thread_time() < ended:
            pass
        await asyncio.sleep(0.001)
        task.cancel()
        return meter

    found = asyncio.run(run()).summary()
    assert found["max"] >= 0.04
    assert found["own_max"] >= 0.04
