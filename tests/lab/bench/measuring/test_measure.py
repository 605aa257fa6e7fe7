# SPDX-License-Identifier: Apache-2.0
"""`measure` on the spans and samples of one job, compared with figures computed by hand."""

from __future__ import annotations

from typing import Any

import pytest

from recipe.async_pipeline.lab.bench.inputs.workload import Workload
from recipe.async_pipeline.lab.bench.measuring.measure import NotEnoughSteps, latencies, measure
from recipe.async_pipeline.lab.bench.measuring.spans import MeasuredSpan
from recipe.async_pipeline.lab.bench.measuring.usage import Usage

WORKLOAD = Workload(reason="two measured steps", steps=2, warmup=1, cooldown=1)
USAGE = [
    Usage(0.0, {"train": 0.0, "generate": 0.0}, 2**30),
    Usage(40.0, {"train": 20.0, "generate": 8.0}, 3 * 2**30),
]


def step(number: int, start: float, end: float, lags: list[int]) -> MeasuredSpan:
    return MeasuredSpan("update_actor", start, end, {"step": number, "samples": len(lags), "lags": lags})


def span(name: str, start: float, end: float, **facts: Any) -> MeasuredSpan:
    return MeasuredSpan(name, start, end, facts)


# Steps end at 10, 14, 20 and 30; the window is 10 to 20.
STEPS = [step(1, 8, 10, [0, 0]), step(2, 12, 14, [0, 1]), step(3, 17, 20, [1, 1]), step(4, 28, 30, [9, 9])]
STOCK = [
    *STEPS,
    span("old_log_prob", 11, 12),
    span("sync", 14, 15),
    span("weights", 14, 15),
    span("paused", 14, 15),
    span("generate", 5, 11),
    span("generate", 14.5, 17),
]


def test_figures_of_an_arm_of_verl() -> None:
    m = measure(STOCK, USAGE, WORKLOAD, started=3.0, load_before=1.5)
    assert m.samples_per_s == pytest.approx(4 / 10)
    assert m.step_s == pytest.approx(5.0)
    assert m.steps_s == [4.0, 6.0]
    # Trains 11-14 and 17-20, waits for weights 14-15.
    assert m.trainer_idle == pytest.approx(0.3)
    # Requests are open 10-11 and 14.5-17; the engine pauses for half a second of that.
    assert m.generator_idle == pytest.approx(0.7)
    assert m.stall_train_s == pytest.approx(0.5)
    assert m.stall_generate_s == pytest.approx(0.25), "half a second of the sync had a request open"
    assert (m.lag_mean, m.lag_max) == (0.75, 1), "the step after the window does not count"
    assert m.cpu_s == {"generate": pytest.approx(1.0), "train": pytest.approx(2.5)}
    assert m.peak_memory_gib == 3.0
    assert m.first_step_s == 7.0
    assert m.load_before == 1.5
    assert m.work == pytest.approx((0.0, 0.0, 3.0, 2.5, 1.0, 1.0, 3.5))


def test_a_pause_for_training_stalls_open_requests() -> None:
    spans = [s for s in STOCK if s.name not in ("paused", "generate")]
    m = measure(
        [*spans, span("paused", 10.5, 15), span("generate", 8, 30)],
        USAGE,
        WORKLOAD,
        started=3.0,
        load_before=0.0,
    )
    assert m.stall_generate_s == pytest.approx(4.5 / 2)
    assert m.generator_idle == pytest.approx(0.45)
    assert m.stall_train_s == pytest.approx(0.5)


def test_a_job_that_ended_early_is_an_error() -> None:
    with pytest.raises(NotEnoughSteps, match="2 of 3 optimizer steps ended"):
        measure(STEPS[:2], USAGE, WORKLOAD, started=0.0, load_before=0.0)


def test_the_latency_of_a_batch_is_the_latency_of_its_slowest_prompt() -> None:
    episodes = [
        span("episode", 0, 4, prompt=1, step=1),
        span("episode", 1, 3, prompt=1, step=1),
        span("judge", 4, 6, prompt=1),  # 6 s
        span("episode", 0.5, 5.5, prompt=2, step=1),  # 5 s: batch 1 takes 6 s
        span("episode", 6, 13, prompt=3, step=1),  # 7 s
        span("episode", 7, 15, prompt=4, step=2),  # 8 s: batch 2, independent of its step
        span("episode", 15, 16, prompt=5, step=3),
        span("episode", 16, 26, prompt=6, step=3),  # batch 3 ends after the window
        span("episode", 17, 18, prompt=7, step=4),  # half a batch
    ]
    assert latencies(episodes, (0, 20), prompts=2) == pytest.approx((7.0, (6 + 5 + 7 + 8) / 4))
    assert latencies([], (0, 20), prompts=2) == (0.0, 0.0)
