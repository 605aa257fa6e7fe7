# SPDX-License-Identifier: Apache-2.0
"""A copy of the policy that only computes log-probs: one more consumer of published versions.

It pulls a version when it needs one, from the memory services that the rollout replicas load from; the
trainer is not involved.
"""

from __future__ import annotations

from typing import Any

from ...errors import ProofError, WeightSyncError
from ...weight_sync.manifest import WeightTicket
from ..host_memory_service import HostMemories


class PolicyCopy:
    """A worker group of `PipelineWorker`s with a forward-only model, and the version that it holds."""

    def __init__(self, role: str, group: Any) -> None:
        self.group = group
        self.version: int | None = None
        """None: the initial weights of the run."""
        self.role = role

    def load(self, ticket: WeightTicket, memories: HostMemories, timeout_s: float) -> None:
        """Load and verify a version on all ranks. Blocks.

        Raises WeightSyncError or ProofError; it is then unknown which weights the ranks hold.
        """
        self.version = None
        loaded = self.group.load_version(ticket, memories, timeout_s)
        found = {one.version for one in loaded}
        if found != {ticket.version}:
            raise WeightSyncError(
                f"{self.role} should have loaded version {ticket.version}, but its ranks hold {sorted(found)}"
            )
        # One rank need not hold a sampled element, but each element is held by some rank.
        if not sum(one.compared for one in loaded):
            raise ProofError(f"v{ticket.version}: nothing could be compared on any rank of {self.role}")
        self.version = ticket.version
