# SPDX-License-Identifier: Apache-2.0
"""Spans and samples of one job, reduced by hand and by `measure`."""

from __future__ import annotations

from typing import Any

import pytest

from recipe.async_pipeline.bench.measure import NotEnoughSteps, latencies, measure
from recipe.async_pipeline.bench.spans import Span
from recipe.async_pipeline.bench.usage import Usage
from recipe.async_pipeline.bench.workload import Workload

WORKLOAD = Workload(reason="two measured steps", steps=2, warmup=1, cooldown=1)
USAGE = [
    Usage(0.0, {"train": 0.0, "generate": 0.0}, 2**30),
    Usage(40.0, {"train": 20.0, "generate": 8.0}, 3 * 2**30),
]


def step(number: int, start: float, end: float, lags: list[int]) -> Span:
    return Span("update_actor", start, end, {"step": number, "samples": len(lags), "lags": lags})


def span(name: str, start: float, end: float, **facts: Any) -> Span:
    return Span(name, start, end, facts)


# Steps end at 10, 14, 20 and 30; the window is 10 to 20.
STEPS = [step(1, 8, 10, [0, 0]), step(2, 12, 14, [0, 1]), step(3, 17, 20, [1, 1]), step(4, 28, 30, [9, 9])]
STOCK = [*STEPS, span("old_log_prob", 11, 12), span("sync", 14, 15), span("generate", 5, 11), span("generate", 14.5, 17)]


def test_a_stock_arm() -> None:
    m = measure(STOCK, USAGE, WORKLOAD, started=3.0, load_average=1.5)
    assert m.samples_per_s == pytest.approx(4 / 10)
    assert m.step_s == pytest.approx(5.0)
    assert m.steps_s == [4.0, 6.0]
    # Trains 11-14 and 17-20, waits for weights 14-15.
    assert m.trainer_idle == pytest.approx(0.3)
    # Requests are open 10-11 and 14.5-17.
    assert m.generator_idle == pytest.approx(0.65)
    assert m.stall_train_s == pytest.approx(0.5)
    assert m.stall_generate_s == pytest.approx(0.25), "half a second of the sync had a request open"
    assert (m.lag_mean, m.lag_max) == (0.75, 1), "the step after the window does not count"
    assert m.cpu_s == {"generate": pytest.approx(1.0), "train": pytest.approx(2.5)}
    assert m.peak_memory_gib == 3.0
    assert m.first_step_s == 7.0
    assert m.load_average == 1.5
    assert m.work == pytest.approx((0.0, 0.0, 3.0, 0.5, 1.0, 3.5))


def test_where_requests_go_on_during_a_sync_only_the_load_stalls_them() -> None:
    m = measure([*STOCK, span("load", 14.7, 14.8)], USAGE, WORKLOAD, started=3.0, load_average=0.0)
    assert m.stall_generate_s == pytest.approx(0.05)
    assert m.stall_train_s == pytest.approx(0.5)


def test_a_job_that_stopped_early_has_no_figures() -> None:
    with pytest.raises(NotEnoughSteps, match="2 optimizer steps ended, 3 are needed"):
        measure(STEPS[:2], USAGE, WORKLOAD, started=0.0, load_average=0.0)


def test_the_first_step_is_never_measured() -> None:
    with pytest.raises(NotEnoughSteps):
        measure(STEPS, USAGE, Workload(reason="r", steps=2, warmup=0), started=0.0, load_average=0.0)


def test_the_latency_of_a_batch_is_that_of_its_slowest_prompt() -> None:
    episodes = [
        span("episode", 0, 4, prompt=1, step=1),
        span("episode", 1, 3, prompt=1, step=1),
        span("judge", 4, 6, prompt=1),  # the slowest prompt of batch 1: 6 s
        span("episode", 0, 5, prompt=2, step=1),
        span("episode", 5, 13, prompt=3, step=2),  # batch 2: 8 s
        span("episode", 6, 26, prompt=4, step=3),  # ends after the window
    ]
    assert latencies(episodes, (0, 20)) == (7.0, pytest.approx((6 + 5 + 8) / 3))
    assert latencies([], (0, 20)) == (0.0, 0.0)
