# SPDX-License-Identifier: Apache-2.0
"""Reduce the asynchrony of weight updates after repeated failures, and restore it after successes.

    asynchronous ──► blocking ──► on-policy          `after` failed updates in a row, one level down
                 ◄──          ◄──                    `clean` good ones in a row, one level up

A weight update has failed if a replica had to be fenced for it. *Blocking*: a step waits until the weights of
the previous step are served by all replicas, so that nothing competes with the load. *On-policy*: in
addition, as few batches are generated ahead as the interval of weight updates allows. The run continues in
each case, only slower; the lag never exceeds its bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Level(IntEnum):
    """What is still done asynchronously."""

    ASYNCHRONOUS = 0
    BLOCKING = 1
    ON_POLICY = 2


@dataclass(frozen=True)
class Change:
    """A change from one level to the next."""

    level: Level
    why: str


@dataclass(frozen=True, kw_only=True)
class Caution:
    """When to change the level."""

    after: int = 3
    """Failed weight updates in a row that lower the level; 0 disables this."""
    clean: int = 20
    """Good weight updates in a row that raise the level."""


class StepDown:
    """Decides after each weight update. Holds no tensors, tasks or clocks."""

    def __init__(self, caution: Caution) -> None:
        """Raises ValueError if `after` < 0 or `clean` < 1."""
        if caution.after < 0 or caution.clean < 1:
            raise ValueError(f"after must be >= 0 and clean >= 1, got {caution.after} and {caution.clean}")
        self._after, self._clean = caution.after, caution.clean
        self._failed_in_a_row = self._good_in_a_row = 0
        self._level = Level.ASYNCHRONOUS

    @property
    def level(self) -> Level:
        return self._level

    def failed(self, reason: str) -> Change | None:
        """Count a failed weight update; returns the change of level, or None."""
        self._good_in_a_row = 0
        self._failed_in_a_row += 1
        if not self._after or self._failed_in_a_row < self._after or self._level is Level.ON_POLICY:
            return None
        count, self._failed_in_a_row = self._failed_in_a_row, 0
        self._level = Level(self._level + 1)
        return Change(self._level, f"{count} weight updates in a row failed; the last, because {reason}")

    def succeeded(self) -> Change | None:
        """Count a successful weight update; returns the change of level, or None."""
        self._failed_in_a_row = 0
        if self._level is Level.ASYNCHRONOUS:
            return None
        self._good_in_a_row += 1
        if self._good_in_a_row < self._clean:
            return None
        self._good_in_a_row = 0
        self._level = Level(self._level - 1)
        return Change(self._level, f"{self._clean} weight updates in a row were good")
