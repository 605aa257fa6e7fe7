# SPDX-License-Identifier: Apache-2.0
"""The trainer as the stages see it: verl's computations, or what a simulation pretends.

Each method is awaited by exactly one stage while that stage holds its lease. Decisions about order and age
(what to admit, when a batch is ready, when to publish) belong to the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

from .flow_state import FlowState
from .groups.items import Admission, Group, Prompt, PromptBatch, Publication, StepBatch
from .groups.recall import Recall
from .lag.degradation import Caution, Change
from .schedule import Schedule


class PipelineTrainer(Protocol):
    """What `AsyncTrainingFlow` requires of a trainer."""

    wait_timeout_s: float | None
    """Deadline of each wait of a stage, in seconds; None: no deadline."""
    caution: Caution
    """When to reduce the asynchrony of weight updates."""
    resumed: FlowState | None
    """The checkpoint of the step before the first; None if the run starts from the beginning."""

    @property
    def schedule(self) -> Schedule:
        """Which groups each step takes, and what is published, validated and saved."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """What the ledger's first record says of the run."""

    def roles(self) -> Sequence[str]:
        """Return the stages of this run; a run without a reference policy has no `ref_logp`."""

    def pools(self) -> Mapping[str, int]:
        """Return the device pools: name to number of devices."""

    def pool_of(self, role: str) -> str | None:
        """Return the pool that the stage `role` computes on, or None if it needs no device."""

    # A decision about data.

    def rejects(self, group: Group) -> Literal["filtered", "failed"] | None:
        """Return why a finished group is not trained and another prompt is drawn instead, or None."""

    # Work.

    async def draw_prompts(self, admission: Admission) -> PromptBatch:
        """Return the next prompts of the dataset, as many as the admission allows."""

    async def restore_prompts(self, uids: Sequence[str]) -> Sequence[Prompt]:
        """Return prompts that were in flight in the checkpoint, in this order."""

    async def generate_group(self, prompt: Prompt, recall: Recall) -> Group | None:
        """Generate and score n responses to one prompt; return None once the group is recalled.

        On a recall it has the rollout abort the requests. A group that is finished at that moment may be
        returned: the caller discards it. A cancellation means that the run is being stopped. Raises what
        the rollout raised.
        """

    async def ask_teacher(self, group: Group) -> Group:
        """Return a finished group with the log-probs of its teacher, or with a flaw and without samples."""

    async def discard(self, group: Group) -> None:
        """Free the samples of a group that is not trained."""

    async def assemble(self, step: int, groups: Sequence[Group]) -> StepBatch:
        """Join groups into a batch that divides over the training ranks."""

    async def compute_log_probs(self, batch: StepBatch) -> StepBatch: ...

    async def compute_ref_log_probs(self, batch: StepBatch) -> StepBatch: ...

    async def compute_values(self, batch: StepBatch) -> StepBatch: ...

    async def compute_advantages(self, batch: StepBatch) -> StepBatch: ...

    async def update(self, batch: StepBatch) -> StepBatch:
        """Take one optimizer step over the batch."""

    async def update_critic(self, batch: StepBatch) -> StepBatch:
        """Take the critic's optimizer step over the batch."""

    async def finish_step(self, batch: StepBatch, facts: Mapping[str, float]) -> float | None:
        """Log the metrics of a trained batch and free its samples.

        Returns the effective sample size, as a share, of the newest batch for which it is known.
        """

    async def save(
        self, state: FlowState, *, models_read: Callable[[], object], all_read: Callable[[], object]
    ) -> bool:
        """Make a checkpoint; returns False if it could not be written and the run is to continue
        without it.

        Calls `models_read` when it needs no device any more, and `all_read` when it does not read
        the models or the samples any more: the next step may then be trained while it is completed. State
        that the trainer adds and that changes concurrently must be read before its first await.
        """

    async def gather(self, version: int) -> object:
        """Copy the full weights into host memory; the training devices are free afterwards."""

    async def publish(self, version: int, snapshot: object) -> Publication:
        """Send a snapshot to every replica; returns when all serve it and have verified it."""

    def narrowed(self, why: str) -> None:
        """Tell the user that fewer, or more, batches are generated ahead in the following steps."""

    def stepped(self, change: Change) -> None:
        """Tell the user that weight updates are less, or more, asynchronous in the following steps."""

    async def watch(self) -> None:
        """Monitor replicas for the lifetime of the run. Raises the error that should end it."""

    async def validate(self, version: int) -> float | None:
        """Validate a version that was just served, if due, while it serves; return seconds, or None."""
