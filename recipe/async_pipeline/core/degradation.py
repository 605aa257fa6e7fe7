# SPDX-License-Identifier: Apache-2.0
"""How much asynchrony the weight updates bear: less after repeated failures, more again after a clean
stretch.

    asynchronous ──► blocking ──► on-policy          `after` failed publications in a row, one level down
                 ◄──          ◄──                    `clean` good ones in a row, one level up

A publication has failed if any replica had to be fenced for it. *Blocking*: a step waits until the weights of
the one
before are served everywhere, so that nothing competes with the load. *On-policy*: besides, as few batches are
generated ahead as the interval of publications allows.
The run goes on in each case, only slower; lag never exceeds what was asked for.
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
    """A step from one level to the next."""

    level: Level
    why: str


@dataclass(frozen=True, kw_only=True)
class Caution:
    """When to step down and up."""

    after: int = 3
    """Failed publications in a row; 0: never."""
    clean: int = 20
    """Good publications in a row."""


class StepDown:
    """Decides after each publication. Holds no tensors, tasks or clocks."""

    def __init__(self, caution: Caution) -> None:
        """Raises ValueError: `after` < 0 or `clean` < 1."""
        if caution.after < 0 or caution.clean < 1:
            raise ValueError(f"after must be >= 0 and clean >= 1, got {caution.after} and {caution.clean}")
        self._after, self._clean = caution.after, caution.clean
        self._failed_in_a_row = self._good_in_a_row = 0
        self._level = Level.ASYNCHRONOUS

    @property
    def level(self) -> Level:
        return self._level

    def failed(self, reason: str) -> Change | None:
        """A publication that some replica did not take; says if that was once too often."""
        self._good_in_a_row = 0
        self._failed_in_a_row += 1
        if not self._after or self._failed_in_a_row < self._after or self._level is Level.ON_POLICY:
            return None
        count, self._failed_in_a_row = self._failed_in_a_row, 0
        self._level = Level(self._level + 1)
        return Change(self._level, f"{count} publications in a row failed; the last, because {reason}")

    def succeeded(self) -> Change | None:
        """A publication that every replica took; says if that makes a clean stretch."""
        self._failed_in_a_row = 0
        if self._level is Level.ASYNCHRONOUS:
            return None
        self._good_in_a_row += 1
        if self._good_in_a_row < self._clean:
            return None
        self._good_in_a_row = 0
        self._level = Level(self._level - 1)
        return Change(self._level, f"{self._clean} publications in a row were good")
