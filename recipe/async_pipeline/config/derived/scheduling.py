# SPDX-License-Identifier: Apache-2.0
"""Turn the knobs into the schedule that a run, or a simulation of it, follows, and into settings.json."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any, NamedTuple

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


QUEUED = 2
"""Requests on a replica for each that its engine generates: the next ones are there when one ends."""


class OpenRequests(NamedTuple):
    """Bounds of one run.

    How many requests may be open on a replica, and how many groups in an agent loop worker.

    Each agent loop worker chooses the replicas of its requests, so the bound of a replica is divided among
    the workers. The shares are fixed: a worker with more groups than another has no larger share. Groups are
    dealt to the workers in turn, so their numbers differ by one at most, and by default the shares together
    are twice what the engine generates at once: it runs dry only if some workers have no requests while
    others have more than twice the average.
    """

    share: int
    """Open requests of one agent loop worker on one replica."""
    per_replica: int
    """The shares of all workers that can have groups."""
    groups: int
    """Groups in flight, which may all be in one worker."""

    @classmethod
    def of(
        cls,
        knobs: AsyncPipelineConfig,
        *,
        engine_slots: int,
        workers: int,
        groups_per_step: int,
        responses_per_group: int,
    ) -> OpenRequests:
        """Return the bounds; `engine_slots` are the requests that one replica generates at once."""
        groups = groups_per_step * (1 + knobs.staleness.max_lag)
        # With fewer groups than workers, some workers have none.
        busy = min(workers, groups)
        bound = knobs.rollout.max_open_requests
        if bound is None:
            # The last group of a step fits, although only its worker has requests then.
            bound = max(QUEUED * engine_slots, busy * min(responses_per_group, engine_slots))
        share = max(1, bound // busy)
        return cls(share=share, per_replica=share * busy, groups=groups)
