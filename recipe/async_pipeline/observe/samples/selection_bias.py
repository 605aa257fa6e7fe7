# SPDX-License-Identifier: Apache-2.0
"""Detect selection bias: whether the trained samples represent the generated ones.

Dropping samples that became too old drops slow samples, so the trainer learns from short responses.
The same holds for turns, and for the reward where it depends on either.

`trained` is a subset of `finished`. Testing one against the other would count samples twice, and samples that
still wait for their step would count as lost. The test therefore compares lost samples with trained samples,
which are disjoint. The effect size is the shift of the trained mean: the mean of the trained samples minus
the mean of trained and lost samples together, in standard deviations of the latter.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

ResponseFate = Literal["finished", "trained", "dropped", "filtered", "redundant"]
"""Every response is `finished`; later, once decided, it also gets one of the other fates."""
Lost = Literal["dropped", "filtered", "redundant"]
Quantity = Literal["tokens", "turns", "seconds", "reward"]

WINDOW = 4096
"""Decided samples per window; the last two windows are compared.

Lengths and rewards drift during training, so samples of the whole run would also differ by their time. A
window covers ten or more steps, which contain enough lost samples for the test.
"""
MIN_SHIFT_SD = 0.1
"""Smallest shift to report, half of a small effect (0.2 sd).

A loss of 5 % shifts the mean that far only if the lost samples lie 2 sd away.
"""
MIN_SAMPLES = 100
"""Least number of samples on both sides; from there the mean of skewed lengths is close to normal."""
MIN_T = 8.0
"""Least absolute t statistic to report.

5 is enough for a test at each of 10^4 steps (p < 10^-6 each). But responses to one prompt are similar and
share their fate: 8 of them with a correlation of 0.2 increase t by a factor of 1.5.
"""

WATCHED: dict[Lost, tuple[Quantity, ...]] = {
    "dropped": ("tokens", "turns", "seconds", "reward"),
    "filtered": ("tokens", "turns", "seconds"),
    "redundant": ("tokens", "turns", "seconds", "reward"),
}
"""Quantities that `warning` checks; filters select by reward on purpose."""
REMEDY: dict[Lost, str] = {
    "dropped": "if these responses were late, raise staleness.max_lag or set staleness.straggler=wait; if "
    "their data or rewards were bad, see bad_data/* and failed",
    "filtered": "relax the filter if it is not meant to select by this quantity",
    "redundant": "agentic.redundancy trains the episodes that finish first; lower it",
}
MORE_OR_LESS: dict[Quantity, tuple[str, str]] = {
    "tokens": ("more tokens", "fewer tokens"),
    "turns": ("more turns", "fewer turns"),
    "seconds": ("more seconds", "fewer seconds"),
    "reward": ("more reward", "less reward"),
}


@dataclass(slots=True)
class Moments:
    """Count, mean and sum of squared deviations of a stream, by Welford's method against cancellation."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        """Add one value to the stream."""
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
        """Unbiased estimate of the population variance; 0 with fewer than two values."""
        return self.squares / (self.count - 1) if self.count > 1 else 0.0

    @property
    def sd(self) -> float:
        """Standard deviation of the population; 0 with fewer than two values."""
        return math.sqrt(self.variance)


class Comparison(NamedTuple):
    """Trained samples against samples lost in one way."""

    trained: Moments
    lost: Moments

    @property
    def shift_sd(self) -> float:
        """Shift of the trained mean due to the lost samples, in standard deviations of all samples."""
        together = self.trained + self.lost
        return _ratio(self.trained.mean - together.mean, together.sd)

    @property
    def t(self) -> float:
        """Welch's t statistic of trained minus lost samples, whose variances may differ."""
        error = self.trained.variance / self.trained.count + self.lost.variance / self.lost.count
        return _ratio(self.trained.mean - self.lost.mean, math.sqrt(error))

    @property
    def matters(self) -> bool:
        """Whether the shift is large and significant, from enough samples on both sides."""
        return (
            min(self.trained.count, self.lost.count) >= MIN_SAMPLES
            and abs(self.shift_sd) >= MIN_SHIFT_SD
            and abs(self.t) >= MIN_T
        )


@dataclass
class _Window:
    samples: Counter[ResponseFate] = field(default_factory=Counter)
    moments: defaultdict[tuple[ResponseFate, Quantity], Moments] = field(
        default_factory=lambda: defaultdict(Moments)
    )
    decided: int = 0
    """Samples with another fate than `finished`."""


class SelectionMeter:
    """Collects samples by fate in constant memory."""

    def __init__(self, window: int = WINDOW) -> None:
        self._size = window
        self._recent, self._before = _Window(), _Window()
        self._reported: set[tuple[Lost, Quantity]] = set()

    def record(
        self,
        fate: ResponseFate,
        *,
        tokens: int | None = None,
        turns: int | None = None,
        seconds: float | None = None,
        reward: float | None = None,
    ) -> None:
        """Record that one response met `fate`; quantities that are unknown or not finite are skipped.

        `seconds` is the time from the request to the end of the response. A response that is cancelled early
        counts with its values at that time, which understates its difference to the trained ones.
        """
        if self._recent.decided == self._size:
            self._before, self._recent = self._recent, _Window()
        self._recent.samples[fate] += 1
        self._recent.decided += fate != "finished"

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
        """Return `bias/...` of the last two windows; metrics without data are absent."""
        found: dict[str, float] = {}

        decided = self._recent.decided + self._before.decided
        if decided:
            for lost in get_args(Lost):
                found[f"bias/{lost}_share"] = (
                    self._recent.samples[lost] + self._before.samples[lost]
                ) / decided

        for quantity in get_args(Quantity):
            of = {fate: self._moments(fate, quantity) for fate in get_args(ResponseFate)}
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
        """Return one line about the largest shift that is not yet reported, or None. Call it once per step.

        A shift is reported again only after it fell below half of the threshold, so that a shift around the
        threshold is not reported every few steps.
        """
        compared = {
            (lost, quantity): found
            for lost, quantity, found in self._comparisons()
            if quantity in WATCHED[lost]
        }
        self._reported = {
            key
            for key in self._reported
            if key in compared and abs(compared[key].shift_sd) >= MIN_SHIFT_SD / 2
        }

        new = [key for key, found in compared.items() if found.matters and key not in self._reported]
        if not new:
            return None

        key = max(new, key=lambda one: abs(compared[one].shift_sd))
        self._reported.add(key)
        return _describe_shift(*key, compared[key])

    def _moments(self, fate: ResponseFate, quantity: Quantity) -> Moments:
        return self._before.moments[fate, quantity] + self._recent.moments[fate, quantity]

    def _comparisons(self) -> Iterator[tuple[Lost, Quantity, Comparison]]:
        """Yield each comparison with at least two samples on both sides, as a variance needs."""
        for lost in get_args(Lost):
            for quantity in get_args(Quantity):
                found = Comparison(self._moments("trained", quantity), self._moments(lost, quantity))
                if min(found.trained.count, found.lost.count) > 1:
                    yield lost, quantity, found


def _describe_shift(lost: Lost, quantity: Quantity, found: Comparison) -> str:
    direction = MORE_OR_LESS[quantity][found.shift_sd < 0]
    return (
        f"selection bias: {found.lost.count} of {found.trained.count + found.lost.count} responses were "
        f"{lost}, so the trained responses have {abs(found.shift_sd):.2f} sd {direction} than all "
        f"(mean {found.trained.mean:.4g}, {lost} {found.lost.mean:.4g}); {REMEDY[lost]}"
    )


def _ratio(difference: float, scale: float) -> float:
    """Return the quotient; with a scale of 0, infinity with the sign of the difference, or 0."""
    if scale:
        return difference / scale
    return math.copysign(math.inf, difference) if difference else 0.0
