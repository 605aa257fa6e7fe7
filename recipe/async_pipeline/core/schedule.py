# SPDX-License-Identifier: Apache-2.0
"""Every decision about order and age, in one place: what a strategy is.

A `Schedule` says when prompts go out and which groups a step takes (`queue`), which versions are published,
validated and saved, and whose log-probs a step uses. The trainer, the simulator and the fakes of the tests
hold one and ask it; none of them decides on its own. Pure: no clock, tensor or Ray handle.

A strategy is a subclass (`recipe.async_pipeline.strategies` has a table of them). It sets `order` or
`implied_lag`, or overrides a method:

    class ShallowAtFirst(Schedule):
        def queue(self, versions):
            queue = super().queue(versions)
            queue.depth = 1
            versions.subscribe(lambda: setattr(queue, "depth", min(self.max_lag, 1 + versions.served // 100)))
            return queue
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from .groups.message_queue import MessageQueue
from .groups.untrained_groups import Order, Straggler
from .lag.staleness import Versions

OldLogpSource = Literal["update", "trainer", "logp_pool", "rollout"]
"""The source of a step's old log-probs: the trainer before the step, by the forward pass of the update or by
a separate one; a copy that holds the last version published before that; or the rollout.
"""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Order and age of what a run generates and trains.

    Version v is the weights after step v; version 0, or that of a checkpoint, is what the run starts with.
    """

    implied_lag: ClassVar[int | None] = None
    """The `max_lag` that the strategy stands for, or None if the user chooses it."""
    order: ClassVar[Order] = "drawn"
    """Which groups a step takes: the next ones in the order of their draws, or the first that finished."""

    batch: int
    """Groups of a step."""
    last_step: int
    first_step: int = 1
    """The step after the checkpoint that the run resumed from."""
    max_lag: int = 0
    """Hard bound of the lag of every trajectory, in versions."""
    depth: int | None = None
    """Batches ahead of the one that trains, if fewer than `max_lag`."""
    ess_floor: float | None = None
    """Fewer batches are ahead while the effective sample size of a step is a smaller share than this."""
    oldest_share: float = 1.0
    """Share of a batch that may have the full `max_lag`."""
    straggler: Straggler = "wait"
    """What happens to an unfinished group that holds up a step."""
    sync_every: int = 1
    """Optimizer steps between weight updates."""
    ref_refresh_every: int = 0
    """Steps after which the reference policy becomes the trained one, or 0 if it never does."""
    old_logp: OldLogpSource = "trainer"
    validate_every: int = 0
    """Versions between validations, or 0 for none."""
    validate_first: bool = False
    """Whether version 0 is validated."""
    save_every: int = 0
    """Steps between checkpoints, or 0 for none."""

    @property
    def least_depth(self) -> int:
        """The fewest batches ahead with which prompts and weights do not wait for each other."""
        return self.sync_every - (self.oldest_share == 1)

    def queue(self, versions: Versions) -> MessageQueue:
        """Return the queue that decides when prompts go out and which groups each step trains on."""
        queue = MessageQueue(
            versions,
            batch=self.batch,
            max_lag=self.max_lag,
            first_step=self.first_step,
            last_step=self.last_step,
            oldest_share=self.oldest_share if self.max_lag else 1.0,
            order=self.order,
            straggler=self.straggler,
        )
        if self.depth is not None:
            queue.depth = min(self.depth, self.max_lag)
        return queue

    def publishes(self, version: int) -> bool:
        """Return whether replicas load `version`. The starting weights are always published."""
        if version < self.first_step or version == self.last_step or self.validates(version):
            return True
        return any(every and version % every == 0 for every in (self.sync_every, self.ref_refresh_every))

    def publication_before(self, version: int) -> int:
        """Return the newest version below `version` that is published."""
        return next(v for v in range(version - 1, -1, -1) if self.publishes(v))

    def old_policy(self, step: int) -> int | None:
        """Return the version whose log-probs `step` takes as old ones, or None for the rollout's
        log-probs.

        `step - 1` is the trainer itself. An older one is a copy elsewhere, which holds published
        versions.
        """
        if self.old_logp == "rollout":
            return None
        if self.old_logp in ("update", "trainer"):
            return step - 1
        started_with = self.first_step - 1
        return started_with if step - 2 <= started_with else self.publication_before(step - 1)

    def reference(self, step: int) -> int | None:
        """Return the published version that is the reference policy of `step`, or None for the first one."""
        every = self.ref_refresh_every
        return ((step - 1) // every * every or None) if every else None

    def validates(self, version: int) -> bool:
        """Return whether `version` is validated once it is served."""
        if version == 0:
            return self.validate_first
        every = self.validate_every
        return every > 0 and (version % every == 0 or version == self.last_step)

    def saves(self, step: int) -> bool:
        """Return whether a checkpoint is written after `step`."""
        every = self.save_every
        return every > 0 and (step % every == 0 or step == self.last_step)


def synchronous(schedule: Schedule) -> Schedule:
    """Return a schedule without any lag: a batch is admitted when the step before it is served."""
    return replace(schedule, max_lag=0, depth=None, ess_floor=None, oldest_share=1.0)
