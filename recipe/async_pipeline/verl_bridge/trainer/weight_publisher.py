# SPDX-License-Identifier: Apache-2.0
"""Gather the trained weights, publish them to the replicas, and lend them to copies of the policy."""

from __future__ import annotations

import time
from typing import Any

from ...config.paths import OWN
from ...core.groups.items import Publication
from ...errors import WeightSyncError
from ...observe.table import LEAST_EXPLAINED, map_coverage
from ...weight_sync.memory.manifest import WeightTicket, joined
from ..calls.ray_calls import BlockingCalls
from ..rollout.replica_pool import RolloutPool
from ..workers.policy_copy import PolicyCopy
from .reporting.terminal import say

METRICS = (
    "version",
    "num_bytes",
    "gather_s",
    "transfer_s",
    "load_s",
    "commit_s",
    "stall_s",
    "tensors_proved",
    "tokens_read_again",
)
"""Values of a weight update that are logged as metrics of a step."""


class WeightPublisher:
    """Keeps the tickets of the two newest versions, which are in the arenas of the training workers."""

    def __init__(
        self,
        actor_group: Any,
        rollout_pool: RolloutPool,
        calls: BlockingCalls,
        load_timeout_s: float,
        *,
        only_warn: bool = False,
    ) -> None:
        self.rollout_pool, self._only_warn = rollout_pool, only_warn
        self._actor_group, self._calls, self._load_timeout_s = actor_group, calls, load_timeout_s
        self._tickets: dict[int, WeightTicket] = {}
        self._last: Publication | None = None

    @property
    def served(self) -> int:
        """The newest version that every replica of the rotation serves; -1 before the first."""
        return -1 if self._last is None else self._last.version

    async def gather(self, version: int) -> WeightTicket:
        """Copy the weights into an arena; the training devices are free afterwards.

        Waits for: slow replicas that read the version whose arena is overwritten. Raises WeightSyncError if
        no training rank reports the version.
        """
        newest = max(self._tickets, default=version)
        await self.rollout_pool.retire(newest - 1)
        tickets = await self._calls(self._actor_group.gather_weights, version)
        shares: list[WeightTicket] = [ticket for ticket in tickets if ticket is not None]
        if not shares:
            raise WeightSyncError(f"no training rank returned a ticket of version {version}")
        ticket = joined(shares)
        self._tickets = {v: t for v, t in self._tickets.items() if v == newest} | {version: ticket}
        return ticket

    async def publish(self, ticket: WeightTicket) -> Publication:
        """Make every replica load and verify a version.

        Raises WeightSyncError if the engine's tables explain too little to notice a wrong loader, unless a
        warning is enough.
        """
        before = None if self._last is None else self._last.explained_share
        self._last = done = await self.rollout_pool.publish(ticket)
        share = done.explained_share
        if share is not None and share != before:
            coverage = map_coverage(share, done.unexplained)
            if share < LEAST_EXPLAINED and not self._only_warn:
                raise WeightSyncError(
                    f"{coverage.removeprefix('WARNING: ')}; try the other engine, or set "
                    f"{OWN}.engine_check=warn to train in spite of that"
                )
            say(coverage)
        return done

    async def load_into(self, policy: PolicyCopy, version: int | None) -> float:
        """Load a version into a copy of the policy, unless it has it, and return the seconds that this took.

        Raises WeightSyncError if the version is neither in an arena nor kept on disk.
        """
        if version is None or version == policy.version:
            return 0.0
        started = time.perf_counter()
        if version in self._tickets:
            ticket = self._tickets[version]
            memories = self.rollout_pool.memories_for(ticket)
            await self._calls(policy.load, ticket, memories, self._load_timeout_s)
        elif version == policy.kept:
            await self._calls(policy.load_kept)
        else:
            lost = f" and could not be kept on disk ({policy.reason})" if version == policy.not_kept else ""
            raise WeightSyncError(
                f"{policy.role} needs version {version}, which is no longer in memory{lost}; resume from a "
                "checkpoint"
            )
        return time.perf_counter() - started

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the newest weight update, or an empty mapping before the first."""
        if self._last is None:
            return {}
        return {f"async_pipeline/param_update/{name}": float(getattr(self._last, name)) for name in METRICS}
