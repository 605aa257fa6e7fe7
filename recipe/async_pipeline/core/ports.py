# SPDX-License-Identifier: Apache-2.0
"""The trainer as the roles see it: what verl does for us, or what a simulation pretends.

Each method is awaited by exactly one role while that role holds its lease. Decisions (what to
admit, when a batch is ready, when to publish) belong to the strategy; the rest is plumbing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from .items import Group, Prompt, PromptBatch, Publication, StepBatch
from .staleness import Versions


class Admission(Protocol):
    """Hands out steps in order; `core.staleness.BatchAdmission` is the one for whole batches."""

    async def next_step(self) -> int:
        """The next step, once its prompts may go out. Raises ChannelClosed: the last step was handed out."""


class PipelineTrainer(Protocol):
    """What a trainer must offer to be driven by `AsyncTrainingFlow`."""

    max_lag: int
    """Hard bound of the lag of any trajectory, in policy versions."""
    first_step: int
    last_step: int
    wait_timeout_s: float | None
    """Deadline of each wait of a role, in seconds."""

    def roles(self) -> Sequence[str]:
        """The roles of this run; a run without a reference policy has no `ref_logp`."""

    def pools(self) -> Mapping[str, int]:
        """Device pools: name to number of devices."""

    def pool_of(self, role: str) -> str | None:
        """The pool that `role` computes on; None if it needs no device."""

    # Decisions of the strategy.

    def admission(self, versions: Versions, max_lag: int) -> Admission:
        """Decides when the prompts of each step may be drawn and sent out."""

    def take_batch(self, next_step: int, waiting: Mapping[int, Sequence[Group]]) -> Sequence[Group] | None:
        """The groups that step `next_step` trains on, out of the finished ones, or None: not yet."""

    # Work.

    async def draw_prompts(self, step: int, served_version: int) -> PromptBatch:
        """The prompts of `step`, in dataset order."""

    async def generate_group(self, prompt: Prompt) -> Group:
        """Answer one prompt n times and score the answers. Raises what the rollout raised."""

    async def assemble(self, step: int, groups: Sequence[Group]) -> StepBatch:
        """Join groups into a batch that divides over the training ranks."""

    async def compute_log_probs(self, batch: StepBatch) -> StepBatch: ...

    async def compute_ref_log_probs(self, batch: StepBatch) -> StepBatch: ...

    async def compute_advantages(self, batch: StepBatch) -> StepBatch: ...

    async def update(self, batch: StepBatch) -> StepBatch:
        """One optimizer step over the batch."""

    async def finish_step(self, batch: StepBatch, facts: Mapping[str, float]) -> None:
        """Log the metrics of a trained batch and free its samples."""

    async def gather(self, version: int) -> object:
        """Copy the full weights into host memory; the training devices are free afterwards."""

    async def publish(self, version: int, snapshot: object) -> Publication:
        """Hand a snapshot to every replica; returns when all serve it and have proved it."""

    async def validate(self, version: int) -> None:
        """Validate a version that was just served, if that is due; it stays served meanwhile."""

