# SPDX-License-Identifier: Apache-2.0
"""Turn the knobs into the schedule that a run, or a simulation of it, follows, and into settings.json."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
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


OLD_LOGP = "training.old_logp"
PATHS = (
    "strategy",
    "staleness.max_lag",
    "staleness.depth",
    "staleness.oldest_share",
    "staleness.straggler",
    "weight_sync.every",
    "training.ref_refresh_every",
    OLD_LOGP,
)


def as_settings(knobs: AsyncPipelineConfig, old_logp: str | None) -> dict[str, Any]:
    """Return the entries of settings.json. `old_logp` is the policy that the run uses, after all defaults."""
    return {path: attrgetter(path)(knobs) for path in PATHS} | {OLD_LOGP: old_logp}


def of_settings(settings: Mapping[str, Any]) -> AsyncPipelineConfig:
    """Read the knobs back. Raises ConfigError if a value is wrong, and KeyError if an entry is missing."""
    return AsyncPipelineConfig.of({path: settings[path] for path in PATHS})
