# SPDX-License-Identifier: Apache-2.0
"""Measure by lag how far the policies that wrote a training batch are from the policy that trains on it.

The lag of a token is the trainer's version at the start of the step minus the version that wrote the token.
The lag of a trajectory is the lag of its oldest token.

Even at lag 0 the importance ratio old/rollout differs from 1, because the rollout engine and the trainer
compute the same log-prob differently. `lag_0` shows this baseline; the excess of the other buckets over it is
due to their age.

`OffPolicyMeter` takes a batch in pieces and keeps sums only, so its memory does not grow with the batch. It
computes the importance ratios of each token in float32 and adds them up in float64. Compared with float64
throughout, means and effective sizes differ by less than 1e-5 of their value; counts, shares, `kl` and
`trajectory_ess` do not differ.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...core.groups.items import Trajectory
from ...core.lag.token_ages import oldest_trained
from ...errors import StalenessViolation
from .token_versions import Ints, TokenVersions, versions_written

"""One row of tokens per trajectory: ragged rows, or a padded array (batch, length)."""
Floats = npt.NDArray[np.float64]
Float32s = npt.NDArray[np.float32]

LOG_RATIO_BOUND = 20.0
"""Clip log-ratios at verl's bound, so that one token cannot make a mean infinite."""
CHUNK_TOKENS = 1 << 16
"""Tokens that are processed together: about 5 MB of temporary arrays."""

_SERIES = tuple(1 / math.factorial(power) for power in range(8, 1, -1))
"""Coefficients of (e^x - 1 - x) / x^2, the highest power first: exact to float32 for |x| <= 0.5."""


class Columns(NamedTuple):
    """Columns of some trajectories, one trajectory after another without padding between them."""

    lengths: Ints
    """Number of tokens of each trajectory."""
    mask: npt.NDArray[Any]
    """Not 0 at generated tokens."""
    rollout_log_probs: npt.NDArray[Any] | None = None
    old_log_probs: npt.NDArray[Any] | None = None

    def part(self, rows: slice, tokens: slice) -> Columns:
        """Return some of the trajectories; `tokens` are their tokens."""
        rollout, old = self.rollout_log_probs, self.old_log_probs
        return Columns(
            self.lengths[rows],
            self.mask[tokens],
            None if rollout is None else rollout[tokens],
            None if old is None else old[tokens],
        )


class OffPolicyMeter:
    """Measures one optimizer step's batch, which is added in any number of parts.

    `mask` is 1 at generated tokens and 0 at tokens of tools and padding. Pass the mask from before verl
    rejects tokens: rejection removes the tokens with the largest ratios, and a gap in the mask looks like a
    turn. `rollout_log_probs` are from the policy that sampled, `old_log_probs` from the policy at the start
    of the step.
    """

    def __init__(
        self, *, trainer_version: int, max_lag: int, clip_low: float = 0.2, clip_high: float = 0.2
    ) -> None:
        self._trainer_version, self._max_lag = trainer_version, max_lag
        self._clip = (_log_bound(1 - clip_low), _log_bound(1 + clip_high))
        self._trajectory_lags = self._token_lags = np.zeros(0, np.int64)
        """Counts by lag."""
        self._trajectories = self._mixed = self._unknown = 0
        self._spans = self._spans_max = self._with_spans = 0
        self._measures_ratios = True
        self._tokens = self._not_finite = 0
        self._ratios: dict[int, _Ratios] = defaultdict(_Ratios)
        self._weights: dict[int, _Weights] = defaultdict(_Weights)
        """Of trajectories, by lag."""

    def add(self, trajectories: Sequence[Trajectory], columns: Columns) -> None:
        """Add some trajectories of the batch.

        Tokens that are masked for their age have the mask 0, and each trajectory has others.

        Raises StalenessViolation if a token is newer than the trainer, ValueError if shapes differ.
        """
        if len(trajectories) != columns.lengths.size or columns.lengths.sum() != columns.mask.size:
            raise ValueError(
                f"{len(trajectories)} trajectories have a mask of {columns.lengths.size} rows and "
                f"{columns.mask.size} tokens"
            )
        ends = np.cumsum(columns.lengths)
        row = token = 0
        while row < len(trajectories):
            after = max(row + 1, int(np.searchsorted(ends, token + CHUNK_TOKENS, side="right")))
            rows, tokens = slice(row, after), slice(token, int(ends[after - 1]))
            self._add(trajectories[rows], columns.part(rows, tokens))
            row, token = after, tokens.stop

    def metrics(self) -> dict[str, float]:
        """Return `lag/...` and, given both kinds of log-probs, `off_policy/...`.

        Tokens where one of the log-probs is not finite count only in `off_policy/non_finite_share`. Metrics
        without data, such as the KL of a lag without tokens, are absent.
        """
        metrics = {
            **_lag_metrics("lag/", "lag/trajectory_share", self._trajectory_lags, self._max_lag),
            **_lag_metrics("lag/token_", "lag/token_share", self._token_lags, self._max_lag),
            "lag/trajectories_without_spans": float(self._unknown),
        }
        if self._trajectories:
            metrics["lag/mixed_version_share"] = self._mixed / self._trajectories
        if self._with_spans:
            metrics["lag/spans_mean"] = self._spans / self._with_spans
            metrics["lag/spans_max"] = float(self._spans_max)
        if not self._measures_ratios:
            return metrics

        metrics["off_policy/non_finite_share"] = self._not_finite / self._tokens if self._tokens else 0.0
        for bucket, ratios in _buckets(self._ratios, _Ratios):
            for name, value in ratios.metrics().items():
                metrics[f"off_policy/{name}/{bucket}"] = value
        for bucket, weights in _buckets(self._weights, _Weights):
            metrics[f"off_policy/trajectory_ess/{bucket}"] = weights.effective_share()
        return metrics

    def _add(self, trajectories: Sequence[Trajectory], columns: Columns) -> None:
        generated = columns.mask != 0
        written = versions_written(trajectories, columns.lengths, generated)
        oldest = [oldest_trained(one) for one in trajectories]
        lags: Ints = self._trainer_version - np.array(
            [one for one in oldest if one is not None], dtype=np.int64
        )
        span_lags = self._trainer_version - written.versions
        for found in (lags, span_lags[written.tokens > 0]):
            if found.size and found.min() < 0:
                raise StalenessViolation(
                    f"the trainer is at version {self._trainer_version}, but its batch contains version "
                    f"{self._trainer_version - int(found.min())}"
                )
        self._trajectory_lags = _added(self._trajectory_lags, lags)
        self._token_lags = _added(self._token_lags, np.repeat(span_lags, written.tokens))
        self._count_spans(trajectories, written)

        rollout, old = columns.rollout_log_probs, columns.old_log_probs
        if rollout is None or old is None:
            self._measures_ratios = False
            return
        if not generated.all():
            rollout, old = rollout[generated], old[generated]
        with np.errstate(invalid="ignore"):  # of two infinite ones
            log_ratio = np.subtract(old, rollout, dtype=np.float64)
        self._add_ratios(log_ratio, lags, span_lags, written)

    def _add_ratios(self, log_ratio: Floats, lags: Ints, span_lags: Ints, written: TokenVersions) -> None:
        finite = np.isfinite(log_ratio)
        usable, summed, row_tokens = log_ratio, log_ratio, written.row_tokens
        self._tokens += log_ratio.size
        if not finite.all():
            self._not_finite += int(finite.size - np.count_nonzero(finite))
            usable, summed = log_ratio[finite], np.where(finite, log_ratio, 0.0)
            row_tokens = _row_sums(finite.astype(np.int64), written.row_tokens)

        in_use = np.unique(span_lags[written.tokens > 0])
        for value in in_use:
            chosen = usable
            if in_use.size > 1:
                chosen = log_ratio[np.repeat(span_lags == value, written.tokens) & finite]
            if chosen.size:
                self._ratios[int(value)].add(chosen, *self._clip)

        log_weights, has_tokens = _row_sums(summed, written.row_tokens), row_tokens > 0
        for value in np.unique(lags[has_tokens]):
            self._weights[int(value)].add(log_weights[has_tokens & (lags == value)])

    def _count_spans(self, trajectories: Sequence[Trajectory], written: TokenVersions) -> None:
        """Count the spans of versions; consecutive turns of one version count as one span."""
        self._trajectories += len(trajectories)
        self._mixed += sum(one.first_version != one.last_version for one in trajectories)
        self._unknown += int(np.count_nonzero(~written.known))

        spans = 1 + written.changes()[written.known & (written.row_tokens > 0)]
        self._spans += int(spans.sum())
        self._spans_max = max(self._spans_max, int(spans.max(initial=0)))
        self._with_spans += spans.size


@dataclass(kw_only=True)
class _Weights:
    """The sums for an effective sample size, scaled by the largest weight so that exp cannot overflow."""

    count: int = 0
    log_scale: float = -math.inf
    total: float = 0.0
    squares: float = 0.0

    def add(self, log_weights: Floats) -> None:
        scale = float(log_weights.max())
        # In float32, exp(-200) is 0; the bound keeps the conversion from overflowing.
        weights = np.exp(np.maximum(log_weights - scale, -200.0).astype(np.float32))
        self.merge(
            _Weights(
                count=weights.size,
                log_scale=scale,
                total=_sum(weights),
                squares=_sum(weights * weights),
            )
        )

    def merge(self, other: _Weights) -> None:
        if not other.count:
            return
        scale = max(self.log_scale, other.log_scale)
        mine, others = math.exp(self.log_scale - scale), math.exp(other.log_scale - scale)
        self.total = self.total * mine + other.total * others
        self.squares = self.squares * mine**2 + other.squares * others**2
        self.count, self.log_scale = self.count + other.count, scale

    def effective_share(self) -> float:
        """Return the effective sample size over the sample size, in (0, 1]: (sum w)^2 / (n sum w^2)."""
        return min(1.0, self.total**2 / (self.count * self.squares))


@dataclass(kw_only=True)
class _Ratios:
    """The sums for the metrics of the importance ratios of some tokens."""

    tokens: int = 0
    ratio: float = 0.0
    ratio_max: float = 0.0
    outside_2x: int = 0
    clipped: int = 0
    log_ratio: float = 0.0
    k3: float = 0.0
    weights: _Weights = field(default_factory=_Weights)

    def add(self, log_ratio: Floats, low: float, high: float) -> None:
        """Add one or more tokens; a log-ratio below `low` or above `high` is clipped."""
        bounded = log_ratio.clip(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).astype(np.float32)
        ratio = np.exp(bounded)
        total = _sum(ratio)
        self.merge(
            _Ratios(
                tokens=ratio.size,
                ratio=total,
                ratio_max=float(ratio.max()),
                outside_2x=int(np.count_nonzero(np.abs(log_ratio) > math.log(2))),
                clipped=int(np.count_nonzero((log_ratio < low) | (log_ratio > high))),
                log_ratio=float(log_ratio.sum()),
                k3=_k3(bounded, ratio),
            )
        )
        if max(-float(log_ratio.min()), float(log_ratio.max())) <= LOG_RATIO_BOUND:
            squares = _sum(ratio * ratio)
            self.weights.merge(_Weights(count=ratio.size, log_scale=0.0, total=total, squares=squares))
        else:
            self.weights.add(log_ratio)

    def merge(self, other: _Ratios) -> None:
        self.tokens += other.tokens
        self.ratio += other.ratio
        self.ratio_max = max(self.ratio_max, other.ratio_max)
        self.outside_2x += other.outside_2x
        self.clipped += other.clipped
        self.log_ratio += other.log_ratio
        self.k3 += other.k3
        self.weights.merge(other.weights)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of one or more tokens.

        `kl` and `kl_k3` are unbiased estimates of KL(rollout || old); `kl_k3` is never negative and has the
        lower variance while the ratios are near 1.
        """
        return {
            "ratio_mean": self.ratio / self.tokens,
            "ratio_max": self.ratio_max,
            "ratio_outside_2x_share": self.outside_2x / self.tokens,
            "clip_share": self.clipped / self.tokens,
            "kl": -self.log_ratio / self.tokens,
            "kl_k3": self.k3 / self.tokens,
            "ess": self.weights.effective_share(),
        }


def _k3(log_ratio: Float32s, ratio: Float32s) -> float:
    """Return the sum of r - 1 - log r, by its series where the subtraction would cancel."""
    # The series is evaluated everywhere; its value for larger arguments is not used.
    small = np.minimum(log_ratio, 0.5)
    series = np.full_like(small, _SERIES[0])
    for coefficient in _SERIES[1:]:
        series *= small
        series += np.float32(coefficient)
    series *= small
    series *= small
    return _sum(np.where(np.abs(log_ratio) <= 0.5, series, ratio - 1 - log_ratio))


def _sum(values: Float32s) -> float:
    return float(values.sum(dtype=np.float64))


def _log_bound(ratio: float) -> float:
    """Return the log of a bound of the ratio, infinite if no bounded ratio reaches it."""
    if ratio <= math.exp(-LOG_RATIO_BOUND):
        return -math.inf
    return math.log(ratio) if ratio < math.exp(LOG_RATIO_BOUND) else math.inf


def _lag_metrics(prefix: str, shares: str, counts: Ints, max_lag: int) -> dict[str, float]:
    """Return mean, 95th percentile (the smallest lag that 95 % do not exceed), max and share of each lag."""
    total = int(counts.sum())
    if not total:
        return {}
    return {
        f"{prefix}mean": float(counts @ np.arange(counts.size)) / total,
        f"{prefix}p95": float(np.argmax(100 * counts.cumsum() >= 95 * total)),
        f"{prefix}max": float(counts.size - 1),
        **{
            f"{shares}/{value}": float(counts[value] / total) if value < counts.size else 0.0
            for value in range(max(counts.size, max_lag + 1))
        },
    }


def _buckets(by_lag: Mapping[int, Any], sums: type[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the sums of all lags together, then of each lag, by the name of the bucket."""
    if by_lag:
        together = sums()
        for one in by_lag.values():
            together.merge(one)
        yield "all", together
    for value in sorted(by_lag):
        yield f"lag_{value}", by_lag[value]


def _added(counts: Ints, values: Ints) -> Ints:
    """Return counts by value with further values; as long as the largest value requires."""
    found = np.bincount(values, minlength=counts.size)
    found[: counts.size] += counts
    return found


def _row_sums(values: npt.NDArray[Any], row_tokens: Ints) -> Any:
    """Return the sum of the values of each row; 0 for a row without values."""
    sums = np.zeros(row_tokens.size, values.dtype)
    filled = row_tokens > 0
    if values.size:
        sums[filled] = np.add.reduceat(values, (np.cumsum(row_tokens) - row_tokens)[filled])
    return sums
