# SPDX-License-Identifier: Apache-2.0
"""How many requests may be open on a replica, and how many groups in an agent loop worker.

Each agent loop worker chooses the replicas of its requests, so the bound of a replica is divided among the
workers. The shares are fixed: a worker with more groups than another has no larger share. Groups are
dealt to the workers in turn, so their numbers differ by one at most, and by default the shares together are
twice what the engine generates at once: it runs dry only if some workers have no requests while others have
more than twice the average.
"""

from __future__ import annotations

from typing import NamedTuple

from ..knobs.schema import AsyncPipelineConfig

QUEUED = 2
"""Requests on a replica for each that its engine generates: the next ones are there when one ends."""


class OpenRequests(NamedTuple):
    """Bounds of one run."""

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
