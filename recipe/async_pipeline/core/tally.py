# SPDX-License-Identifier: Apache-2.0
"""What became of every prompt that was drawn: exactly one fate each, or the run says which are lost."""

from __future__ import annotations

from collections import Counter
from typing import Literal

from ..errors import ConservationError
from .items import Publication

Fate = Literal["trained", "filtered", "expired", "failed"]
"""filtered: finished, and teaches nothing. expired: given up, because it held a step up. failed: its data is bad."""


class Tally:
    """Counts that must balance at the end of a run."""

    def __init__(self) -> None:
        self.drawn: set[str] = set()
        self.fates: dict[str, Fate] = {}
        self.trained: dict[str, int] = {}
        """The step that each trained prompt was in."""
        self.regenerated = 0
        self.trajectories_trained = 0
        self.steps = 0
        self.lag_max = 0
        self.publications: list[Publication] = []
        self._counts: Counter[Fate] = Counter()

    def draw(self, uid: str) -> None:
        """Raises ConservationError: the prompt was drawn before."""
        if uid in self.drawn:
            raise ConservationError(f"prompt {uid} was drawn twice")
        self.drawn.add(uid)

    def train(self, uid: str, step: int, num_trajectories: int) -> None:
        """Raises ConservationError: never drawn, or it has a fate."""
        if uid in self.trained:
            raise ConservationError(f"step {step} trained prompt {uid} again; step {self.trained[uid]} had it")
        self._settle(uid, "trained")
        self.trained[uid] = step
        self.trajectories_trained += num_trajectories

    def give_up(self, uid: str, fate: Literal["filtered", "expired", "failed"]) -> None:
        """A group will not be trained. Raises ConservationError: never drawn, or it has a fate."""
        self._settle(uid, fate)

    def count(self, fate: Fate) -> int:
        """Groups of this fate."""
        return self._counts[fate]

    def in_flight(self) -> set[str]:
        """Prompts without a fate."""
        return self.drawn - self.fates.keys()

    def check(self) -> None:
        """Raises ConservationError: some prompt that was drawn has no fate."""
        lost = self.in_flight()
        if lost:
            raise ConservationError(f"{len(lost)} of {len(self.drawn)} prompts were lost, e.g. {sorted(lost)[:3]}")

    def _settle(self, uid: str, fate: Fate) -> None:
        if uid not in self.drawn:
            raise ConservationError(f"prompt {uid} is {fate}, but was never drawn")
        if uid in self.fates:
            raise ConservationError(f"prompt {uid} is {fate}, but was {self.fates[uid]} before")
        self.fates[uid] = fate
        self._counts[fate] += 1
