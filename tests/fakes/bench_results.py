# SPDX-License-Identifier: Apache-2.0
"""Results of benchmark jobs, as they are measured."""

from __future__ import annotations

from typing import Any

import msgspec

from recipe.async_pipeline.lab.bench.measuring.measure import Measured, StageWork

ONE = Measured(
    samples_per_s=10.0,
    step_s=4.0,
    steps_s=[4.0, 4.0],
    trainer_idle=0.5,
    generator_idle=0.25,
    stall_train_s=0.1,
    stall_generate_s=0.2,
    lag_mean=0.0,
    lag_max=0,
    cpu_s={"train": 1.0, "generate": 0.5},
    peak_memory_gib=3.0,
    first_step_s=100.0,
    load_before=2.0,
    foreign_cpu=0.1,
    work=StageWork(
        tail_s=3.0, group_s=1.0, train_s=0.9, update_s=0.9, weights_s=0.1, generate_cpu_s=0.5, cpu_s=1.5
    ),
)


def arm(rate: float, **changes: Any) -> Measured:
    return msgspec.structs.replace(ONE, samples_per_s=rate, step_s=32 / rate, **changes)


RESULTS = {
    "verl_sync": [arm(8.0), arm(4.0)],
    "one_step_off": [arm(16.0, lag_max=1, lag_mean=1.0), arm(8.0, lag_max=1, lag_mean=1.0)],
}
