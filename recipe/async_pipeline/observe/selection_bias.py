# SPDX-License-Identifier: Apache-2.0
"""Is what is trained a fair sample of what was generated?

Dropping what became too old drops the answers that took long, or begins them again: the trainer then learns
from
short ones. The same holds for turns, and for the reward wherever it depends on either.

`trained` is a part of `finished`, so that a test of the one against the other would count the same samples
twice,
and what still waits for its step would look like a loss. The test therefore compares those lost with those
trained,
which are different samples, and the size is what the loss did to the trained mean: the mean of those trained
minus
that of those trained and lost together, in standard deviations of the latter.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

Fate = Literal["finished", "trained", "dropped", "filtered"]
"""`finished` is every answer; each of them is one of the others later, once it is decided."""
Lost = Literal["dropped", "filtered"]
Quantity = Literal["tokens", "turns", "seconds", "reward"]

WINDOW = 4096
"""Decided samples a window. The last two are compared: lengths and rewards drift in training, and samples
from the
whole run would differ by when they were lost. It is ten or more steps, and holds enough losses to tell."""
MIN_SHIFT_SD = 0.1
"""Half of what is called a small effect. A loss of 5 % shifts the mean by as much only if the lost lie 2
sd away.
"""
MIN_SAMPLES = 100
"""Of both sides: from there on the mean of skewed lengths is close to normal, as the test needs it."""
MIN_T = 8.0
"""5 would do for a test at each of 10^4 steps (p < 10^-6 each). But the answers to one prompt resemble each
other and
share their fate: 8 of them, correlated by 0.2, make t 1.5 times as large."""

WATCHED: dict[Lost, tuple[Quantity, ...]] = {
    "dropped": ("tokens", "turns", "seconds", "reward"),
    "filtered": ("tokens", "turns", "seconds"),
}
"""What `warning` speaks of. Filters are there to select by reward."""
REMEDY: dict[Lost, str] = {
    "dropped": "if they held steps up, raise max_lag or set stale=wait; if their data or rewards were bad, "
    "see bad_data/* and failed",
    "filtered": "weaken the filter, if it is not meant to select by that",
}
MORE_OR_LESS: dict[Quantity, tuple[str, str]] = {
    "tokens": ("more tokens", "fewer tokens"),
    "turns": ("more turns", "fewer turns"),
    "seconds": ("more seconds", "fewer seconds"),
    "reward": ("more reward", "less reward"),
}


@dataclass(slots=True)
class Moments:
    """Count, mean and sum of squared deviations of a stream (Welford): no cancellation, whatever the mean
    is.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        delta = value - self.mean
        self.mean += delta / self.count
        self.squares += delta * (value - self.mean)

    def __add__(self, other: Moments) -> Moments:
        count = self.count + other.count
        if not count:
            return Moments()
        delta = other.mean - self.mean
        return Moments(
            count,
            self.mean + delta * other.count / count,
            self.squares + other.squares + delta**2 * self.count * other.count / count,
        )

    @property
    def variance(self) -> float:
        """Of the population, as the sample estimates it; 0 of fewer than two."""
        return self.squares / (self.count - 1) if self.count > 1 else 0.0

    @property
    def sd(self) -> float:
        return math.sqrt(self.variance)


class Comparison(NamedTuple):
    """Those trained against those lost in one way."""

    trained: Moments
    lost: Moments

    @property
    def shift_sd(self) -> float:
        """How far the loss moved the trained mean."""
        together = self.trained + self.lost
        return _ratio(self.trained.mean - together.mean, together.sd)

    @property
    def t(self) -> float:
        """Welch's, of those trained minus those lost; their variances may differ."""
        error = self.trained.variance / self.trained.count + self.lost.variance / self.lost.count
        return _ratio(self.trained.mean - self.lost.mean, math.sqrt(error))

    @property
    def matters(self) -> bool:
        return (
            min(self.trained.count, self.lost.count) >= MIN_SAMPLES
            and abs(self.shift_sd) >= MIN_SHIFT_SD
            and abs(self.t) >= MIN_T
        )


@dataclass
class _Window:
    samples: Counter[Fate] = field(default_factory=Counter)
    moments: defaultdict[tuple[Fate, Quantity], Moments] = field(default_factory=lambda: defaultdict(Moments))

    @property
    def decided(self) -> int:
        return self.samples.total() - self.samples["finished"]


class SelectionMeter:
    """Collects samples by their fate; keeps a few numbers of each, however long the run is."""

    def __init__(self, window: int = WINDOW) -> None:
        self._size = window
        self._recent, self._before = _Window(), _Window()
        self._said: set[tuple[Lost, Quantity]] = set()

    def record(
        self,
        fate: Fate,
        *,
        tokens: int | None = None,
        turns: int | None = None,
        seconds: float | None = None,
        reward: float | None = None,
    ) -> None:
        """One answer met `fate`. What is not known, or not finite, is left out.

        `seconds` are those from its request to its end. Of an answer that is given up before its end they may
        be all
        that is known. It counts with what it had by then, so a difference to those trained is understated.
        """
        if self._recent.decided == self._size:
            self._before, self._recent = self._recent, _Window()
        self._recent.samples[fate] += 1
        values: dict[Quantity, float | None] = {
            "tokens": tokens,
            "turns": turns,
            "seconds": seconds,
            "reward": reward,
        }
        for quantity, value in values.items():
            if value is not None and math.isfinite(value):
                self._recent.moments[fate, quantity].add(value)

    def metrics(self) -> dict[str, float]:
        """`bias/...` of the last two windows; a metric of nothing is left out."""
        found: dict[str, float] = {}
        decided = self._recent.decided + self._before.decided
        if decided:
            for lost in get_args(Lost):
                found[f"bias/{lost}_share"] = (
                    self._recent.samples[lost] + self._before.samples[lost]
                ) / decided
        for quantity in get_args(Quantity):
            of = {fate: self._moments(fate, quantity) for fate in get_args(Fate)}
            found |= {f"bias/{quantity}/{fate}_mean": one.mean for fate, one in of.items() if one.count}
            trained, finished = of["trained"], of["finished"]
            if trained.count and finished.count:
                difference = _ratio(trained.mean - finished.mean, finished.sd)
                found[f"bias/{quantity}/trained_vs_finished_sd"] = difference
        for lost, quantity, comparison in self._comparisons():
            found[f"bias/{quantity}/{lost}_shift_sd"] = comparison.shift_sd
            found[f"bias/{quantity}/{lost}_t"] = comparison.t
        return {name: value for name, value in found.items() if math.isfinite(value)}

    def warning(self) -> str | None:
        """One line about the largest shift that was not spoken of yet, or None. To be asked once a step.

        A shift is spoken of again only after it was gone: below half of the threshold, so that one that stays
        around it is not news every few steps.
        """
        compared = {
            (lost, quantity): found
            for lost, quantity, found in self._comparisons()
            if quantity in WATCHED[lost]
        }
        self._said = {
            key for key in self._said if key in compared and abs(compared[key].shift_sd) >= MIN_SHIFT_SD / 2
        }
        new = [key for key, found in compared.items() if found.matters and key not in self._said]
        if not new:
            return None
        key = max(new, key=lambda one: abs(compared[one].shift_sd))
        self._said.add(key)
        return _in_words(*key, compared[key])

    def _moments(self, fate: Fate, quantity: Quantity) -> Moments:
        return self._before.moments[fate, quantity] + self._recent.moments[fate, quantity]

    def _comparisons(self) -> Iterator[tuple[Lost, Quantity, Comparison]]:
        """Of all pairs of which both sides can have a variance."""
        for lost in get_args(Lost):
            for quantity in get_args(Quantity):
                found = Comparison(self._moments("trained", quantity), self._moments(lost, quantity))
                if min(found.trained.count, found.lost.count) > 1:
                    yield lost, quantity, found


def _in_words(lost: Lost, quantity: Quantity, found: Comparison) -> str:
    direction = MORE_OR_LESS[quantity][found.shift_sd < 0]
    return (
        f"selection bias: because {found.lost.count} of {found.trained.count + found.lost.count} answers "
        f"were {lost}, "
        f"those trained have {abs(found.shift_sd):.2f} sd {direction} than all of them (on average "
        f"{found.trained.mean:.4g}, those {lost} {found.lost.mean:.4g}); {REMEDY[lost]}"
    )


def _ratio(difference: float, scale: float) -> float:
    """Also where nothing scatters."""
    if scale:
        return difference / scale
    return math.copysign(math.inf, difference) if difference else 0.0
