# SPDX-License-Identifier: Apache-2.0
"""The trainer as the roles see it: what verl does for us, or what a simulation pretends.

Each method is awaited by exactly one stage while that stage holds its lease. Decisions about order and age
(what to admit, when a batch is ready, when to publish) belong to the schedule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from .degradation import Caution, Change
from .flow_state import FlowState
from .items import Group, Prompt, PromptBatch, Publication, StepBatch, Ticket
from .schedule import Schedule


class PipelineTrainer(Protocol):
    """What a trainer must offer to be driven by `AsyncTrainingFlow`."""

    schedule: Schedule
    """Which groups each step takes, and what is published, validated and saved."""
    wait_timeout_s: float | None
    """Deadline of each wait of a role, in seconds."""
    facts: Mapping[str, Any]
    """What the ledger says of the run."""
    caution: Caution
    """When weight updates are to be done with less asynchrony."""
    resumed: FlowState | None
    """What a checkpoint of the step before the first says; None: the run begins."""

    def roles(self) -> Sequence[str]:
        """The roles of this run; a run without a reference policy has no `ref_logp`."""

    def pools(self) -> Mapping[str, int]:
        """Device pools: name to number of devices."""

    def pool_of(self, role: str) -> str | None:
        """The pool that `role` computes on; None if it needs no device."""

    # A decision about data.

    def rejects(self, group: Group) -> Literal["filtered", "failed"] | None:
        """Why a finished group is not trained, and another prompt drawn instead; None: it is."""

    # Work.

    async def draw_prompts(self, ticket: Ticket) -> PromptBatch:
        """The next prompts of the dataset, as many as the ticket says."""

    async def restore_prompts(self, uids: Sequence[str]) -> Sequence[Prompt]:
        """Prompts that were in flight in the process that this one goes on for, in this order."""

    async def generate_group(self, prompt: Prompt) -> Group:
        """Answer one prompt n times and score the answers. Raises what the rollout raised.

        Cancelled, it has the rollout give the answers up.
        """

    async def discard(self, group: Group) -> None:
        """Free the samples of a group that is not trained."""

    async def assemble(self, step: int, groups: Sequence[Group]) -> StepBatch:
        """Join groups into a batch that divides over the training ranks."""

    async def compute_log_probs(self, batch: StepBatch) -> StepBatch: ...

    async def compute_ref_log_probs(self, batch: StepBatch) -> StepBatch: ...

    async def compute_values(self, batch: StepBatch) -> StepBatch: ...

    async def compute_advantages(self, batch: StepBatch) -> StepBatch: ...

    async def update(self, batch: StepBatch) -> StepBatch:
        """One optimizer step over the batch."""

    async def update_critic(self, batch: StepBatch) -> StepBatch:
        """The critic's optimizer step over the batch."""

    async def finish_step(self, batch: StepBatch, facts: Mapping[str, float]) -> None:
        """Log the metrics of a trained batch and free its samples."""

    async def save(self, state: FlowState) -> bool:
        """Make a checkpoint. What the trainer adds of its own that changes beside, it takes before it first
        waits.

        False: it could not be written, and the run is to go on without.
        """

    async def gather(self, version: int) -> object:
        """Copy the full weights into host memory; the training devices are free afterwards."""

    async def publish(self, version: int, snapshot: object) -> Publication:
        """Hand a snapshot to every replica; returns when all serve it and have proved it."""

    def stepped(self, change: Change) -> None:
        """Less, or more, is done asynchronously from now on; for the user to know."""

    async def watch(self) -> None:
        """Look after whatever serves, beside the roles and for as long as they run. Raises what is to end
        the run.
        """

    async def validate(self, version: int) -> float | None:
        """Validate a version that was just served, if that is due; it stays served meanwhile. Returns the
        seconds.
        """
