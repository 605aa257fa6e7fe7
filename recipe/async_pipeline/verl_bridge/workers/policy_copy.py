# SPDX-License-Identifier: Apache-2.0
"""A copy of the policy that only computes log-probs: one more consumer of published versions.

It pulls a version when it needs one, out of the arenas that the rollout replicas load from; the trainer takes
no part.
"""

from __future__ import annotations

from typing import Any

from ...errors import WeightSyncError
from ...weight_sync.manifest import Ticket


class PolicyCopy:
    """A worker group of `PipelineWorker`s with a forward-only model, and the version that it holds."""

    def __init__(self, role: str, group: Any, courier: Any | None) -> None:
        """`courier`: for a group on another host than the trainer's arenas."""
        self.group = group
        self.version: int | None = None
        """None: what the run began with."""
        self.role, self._courier = role, courier

    def load(self, ticket: Ticket, timeout_s: float) -> None:
        """Have all its ranks hold a version, proved. Blocks.

        Raises WeightSyncError, ProofError: they do not; what they hold then is not known.
        """
        self.version = None
        found = set(self.group.load_version(ticket, self._courier, timeout_s))
        if found != {ticket.version}:
            raise WeightSyncError(
                f"{self.role} was to load version {ticket.version}, and its ranks hold {sorted(found)}"
            )
        self.version = ticket.version
