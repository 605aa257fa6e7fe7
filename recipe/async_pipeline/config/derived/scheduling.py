# SPDX-License-Identifier: Apache-2.0
"""Turn the knobs into the schedule that a run, or a simulation of it, follows."""

from __future__ import annotations

from typing import Any

from ...core.schedule import Schedule
from ...strategies import schedule_class
from ..knobs.schema import AsyncPipelineConfig


def schedule_of(
    knobs: AsyncPipelineConfig, *, strategy: type[Schedule] | None = None, **of_the_run: Any
) -> Schedule:
    """Return the schedule that the knobs ask for.

    `strategy` replaces the class that `knobs.strategy` names. `of_the_run` holds the fields that are not
    knobs: `batch`, `last_step`, `first_step`, `old_logp`, `validate_every`, `validate_first`, `save_every`.
    Raises ConfigError if the strategy cannot be imported or has no schedule.
    """
    cls, staleness = strategy or schedule_class(knobs.strategy), knobs.staleness
    return cls(
        max_lag=staleness.max_lag,
        depth=staleness.depth,
        ess_floor=staleness.ess_floor,
        oldest_share=staleness.oldest_share,
        straggler=staleness.straggler,
        sync_every=knobs.weight_sync.every,
        ref_refresh_every=knobs.training.ref_refresh_every,
        **of_the_run,
    )
