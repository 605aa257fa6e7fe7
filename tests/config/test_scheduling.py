# SPDX-License-Identifier: Apache-2.0
"""The schedule follows the knobs."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from recipe.async_pipeline.config.scheduling import schedule_of
from recipe.async_pipeline.config.schema import (
    AsyncPipelineConfig,
    FaultsConfig,
    StalenessConfig,
    TrainingConfig,
)
from recipe.async_pipeline.config.weight_sync import WeightSyncConfig
from recipe.async_pipeline.core.schedule import Schedule
from recipe.async_pipeline.strategies import FullyAsync, NStepAhead


def test_each_field_is_a_knob_or_of_the_run() -> None:
    knobs = AsyncPipelineConfig(
        strategy="fully_async",
        staleness=StalenessConfig(max_lag=5, depth=4, oldest_share=0.5, straggler="drop"),
        weight_sync=WeightSyncConfig(every=2),
        training=TrainingConfig(ref_refresh_every=3),
        faults=FaultsConfig(checkpoint_attempts=2),
    )
    of_the_run: dict[str, Any] = {
        "batch": 8,
        "first_step": 3,
        "last_step": 9,
        "old_logp": "rollout",
        "validate_every": 4,
        "validate_first": True,
        "save_every": 5,
    }
    found = schedule_of(knobs, **of_the_run)
    assert type(found) is FullyAsync
    default = Schedule(batch=1, last_step=1)
    for field in fields(Schedule):
        assert getattr(found, field.name) != getattr(default, field.name), f"{field.name} is not passed on"


def test_a_trainer_may_pass_another_class() -> None:
    knobs = AsyncPipelineConfig.of({"strategy": "fully_async", "staleness.max_lag": 1})
    assert type(schedule_of(knobs, strategy=NStepAhead, batch=1, last_step=1)) is NStepAhead
