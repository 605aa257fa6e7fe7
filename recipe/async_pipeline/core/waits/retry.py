# SPDX-License-Identifier: Apache-2.0
"""One policy for everything that is not training itself: files, trackers, callbacks, checkpoints.

    success ──► no failures in a row
    failure ──► tried again after a pause, which doubles up to a bound ──► `limit` in a row: given up

What is given up is switched off if it only observes the run, and ends the run otherwise. Pure: the unit of
time is the caller's, seconds or optimizer steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import CheckpointError
from ..schedule import Schedule

SAVE_ATTEMPTS = 10
SAVE_PATIENCE_S = 1800.0
"""A run ends after so many checkpoints in a row that a disk has prevented, and so many seconds: steps may be
short, and a full disk is emptied by a person.
"""


@dataclass(kw_only=True)
class Retry:
    """The failures of one side effect."""

    limit: int
    """Failures in a row after which it is given up."""
    first: float
    """The pause after the first failure."""
    longest: float
    in_a_row: int = 0
    total: int = 0
    due: float = 0.0
    """When it may be tried again, if it has failed."""

    def is_due(self, now: float) -> bool:
        """Return whether it may be tried now."""
        return not self.in_a_row or now >= self.due

    def failed(self, now: float) -> bool:
        """Count a failure. Returns whether it may be tried again, from `due` on."""
        self.in_a_row += 1
        self.total += 1
        # The exponent is bounded, because a float is.
        self.due = now + min(self.longest, self.first * 2.0 ** min(self.in_a_row - 1, 60))
        return self.in_a_row < self.limit

    def succeeded(self) -> None:
        """Forget the failures in a row."""
        self.in_a_row = 0


class CheckpointTimes:
    """After which steps a checkpoint is written: the schedule's, and others after one that failed."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._retry = Retry(limit=SAVE_ATTEMPTS, first=1, longest=max(1, schedule.save_every))
        self._again: int | None = None
        self._failing_since = 0.0
        self.last = schedule.first_step - 1
        """The step of the last checkpoint that can be resumed from, or of the start."""

    @property
    def failures(self) -> int:
        """Checkpoints of this process that could not be written."""
        return self._retry.total

    def saves(self, step: int) -> bool:
        """Return whether a checkpoint is written after `step`."""
        return step == self._again or self._schedule.saves(step)

    def age(self, step: int) -> int:
        """Return how many steps would be lost after `step`."""
        return step - self.last

    def request(self, newest: int) -> int:
        """Have a checkpoint written as soon as possible. Returns its step.

        `newest`: the newest step of any model; no stage has decided yet whether the next one is saved.
        """
        self._again = newest + 1
        return self._again

    def succeeded(self, step: int) -> None:
        """Note a complete checkpoint."""
        self._retry.succeeded()
        self.last, self._again = max(self.last, step), None

    def failed(self, step: int, newest: int, now_s: float) -> None:
        """Note that the checkpoint of `step` could not be written. `newest`: the newest step of any model.

        Raises CheckpointError after `SAVE_ATTEMPTS` failures in a row and `SAVE_PATIENCE_S`.
        """
        if not self._retry.in_a_row:
            self._failing_since = now_s
        if not self._retry.failed(step) and now_s - self._failing_since >= SAVE_PATIENCE_S:
            raise CheckpointError(
                f"the last {self._retry.in_a_row} checkpoints could not be written, because the disk is full "
                f"or fails; the last complete one is of step {self.last}: free space or repair it, and resume"
            )
        # The critic may decide already whether it waits for a checkpoint of the step after `newest`.
        self._again = max(int(self._retry.due), newest + 2)
