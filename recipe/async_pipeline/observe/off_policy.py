# SPDX-License-Identifier: Apache-2.0
"""Measure by lag how far the policies that wrote a training batch are from the policy that trains on it.

The lag of a token is the trainer's version at the start of the step minus the version that wrote the token.
The lag of a trajectory is the lag of its oldest token.

Even at lag 0 the importance ratio old/rollout differs from 1, because the rollout engine and the trainer
compute the same log-prob differently. `lag_0` shows this baseline; the excess of the other buckets over it is
due to their age.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..core.items import Trajectory
from ..errors import StalenessViolation

Rows = Iterable[npt.ArrayLike]
"""One row of tokens per trajectory: ragged rows, or a padded array (batch, length)."""
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

LOG_RATIO_BOUND = 20.0
"""Clip log-ratios at verl's bound, so that one token cannot make a mean infinite."""


def token_versions(trajectory: Trajectory, generated: npt.NDArray[np.bool_]) -> tuple[Ints, bool]:
    """Return the version of each generated token of a response, and whether the spans are complete.

    The spans are complete if one begins with each turn: an agent loop of several calls may keep the spans of
    one call only. If they are not, every token counts as written by the oldest version.
    """
    positions = np.flatnonzero(generated)
    turns = positions[np.diff(positions, prepend=-2) > 1]
    spans = np.asarray(trajectory.spans or (), dtype=np.int64).reshape(-1, 2)
    starts = spans[:, 1]
    if not spans.size or np.any(np.diff(starts) <= 0) or not np.isin(turns, starts).all():
        return np.full(positions.size, trajectory.first_version, dtype=np.int64), False
    return spans[np.searchsorted(starts, positions, side="right") - 1, 0], True


def off_policy_metrics(
    trajectories: Sequence[Trajectory],
    *,
    trainer_version: int,
    max_lag: int,
    mask: Rows,
    rollout_log_probs: Rows | None = None,
    old_log_probs: Rows | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> dict[str, float]:
    """Return `lag/...` and, given both kinds of log-probs, `off_policy/...` for one optimizer step's batch.

    `mask` is 1 at generated tokens and 0 at tokens of tools and padding; log-probs have the same shapes. Pass
    the mask from before verl rejects tokens: rejection removes the tokens with the largest ratios, and a gap
    in the mask looks like a turn. `rollout_log_probs` are from the policy that sampled, `old_log_probs` from
    the policy at the start of the step. Tokens where one of them is not finite count only in
    `off_policy/non_finite_share`. Metrics without data, such as the KL of a lag without tokens, are absent.

    Raises StalenessViolation if a token is newer than the trainer, ValueError or IndexError if shapes differ.
    """
    generated = [np.asarray(row) != 0 for row in mask]
    written = [token_versions(one, row) for one, row in zip(trajectories, generated, strict=True)]

    lags: Ints = trainer_version - _concat([[one.first_version] for one in trajectories])
    token_lags: Ints = trainer_version - _concat([versions for versions, _ in written])
    for found in (lags, token_lags):
        if np.any(found < 0):
            newest = trainer_version - int(found.min())
            raise StalenessViolation(
                f"the trainer is at version {trainer_version}, but its batch contains version {newest}"
            )

    metrics = {
        **_lag_metrics("lag/", "lag/trajectory_share", lags, max_lag),
        **_lag_metrics("lag/token_", "lag/token_share", token_lags, max_lag),
        **_span_metrics(trajectories, written),
    }
    if rollout_log_probs is None or old_log_probs is None:
        return metrics

    rollout, old = _generated(rollout_log_probs, generated), _generated(old_log_probs, generated)
    finite = np.isfinite(rollout) & np.isfinite(old)
    log_ratio = old[finite] - rollout[finite]
    owner = _concat([np.full(versions.size, index) for index, (versions, _) in enumerate(written)])[finite]
    metrics["off_policy/non_finite_share"] = 1.0 - float(finite.mean()) if finite.size else 0.0

    for bucket, chosen in _buckets(token_lags[finite]):
        for name, value in _ratio_metrics(log_ratio[chosen], clip_low, clip_high).items():
            metrics[f"off_policy/{name}/{bucket}"] = value

    has_tokens = np.bincount(owner, minlength=lags.size) > 0
    log_weights = np.bincount(owner, weights=log_ratio, minlength=lags.size)[has_tokens]
    for bucket, chosen in _buckets(lags[has_tokens]):
        metrics[f"off_policy/trajectory_ess/{bucket}"] = effective_share(log_weights[chosen])
    return metrics


def effective_share(log_weights: Floats) -> float:
    """Return the effective sample size over the sample size, in (0, 1]: (sum w)^2 / (n sum w^2)."""
    # The scale of the weights cancels; with 1 as the largest weight, exp cannot overflow.
    weights = np.exp(log_weights - log_weights.max())
    return min(1.0, float(weights.sum() ** 2 / (weights.size * (weights**2).sum())))


def _lag_metrics(prefix: str, shares: str, lags: Ints, max_lag: int) -> dict[str, float]:
    """Return mean, 95th percentile (the smallest lag that 95 % do not exceed), max and share of each lag."""
    if not lags.size:
        return {}
    counts = np.bincount(lags, minlength=max_lag + 1)
    return {
        f"{prefix}mean": float(lags.mean()),
        f"{prefix}p95": float(np.argmax(100 * counts.cumsum() >= 95 * lags.size)),
        f"{prefix}max": float(lags.max()),
        **{f"{shares}/{value}": float(count / lags.size) for value, count in enumerate(counts)},
    }


def _span_metrics(
    trajectories: Sequence[Trajectory], written: Sequence[tuple[Ints, bool]]
) -> Mapping[str, float]:
    """Return metrics of the version spans; consecutive turns of one version count as one span."""
    metrics = {"lag/trajectories_without_spans": float(sum(not known for _, known in written))}
    if trajectories:
        metrics["lag/mixed_version_share"] = float(
            np.mean([one.first_version != one.last_version for one in trajectories])
        )
    spans = [
        1 + np.count_nonzero(np.diff(versions)) for versions, known in written if known and versions.size
    ]
    if spans:
        metrics |= {"lag/spans_mean": float(np.mean(spans)), "lag/spans_max": float(max(spans))}
    return metrics


def _ratio_metrics(log_ratio: Floats, clip_low: float, clip_high: float) -> dict[str, float]:
    """Return metrics of the importance ratios of one or more tokens.

    `kl` and `kl_k3` are unbiased estimates of KL(rollout || old); `kl_k3` is never negative and has the lower
    variance while the ratios are near 1.
    """
    bounded = np.clip(log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = np.exp(bounded)
    return {
        "ratio_mean": float(ratio.mean()),
        "ratio_max": float(ratio.max()),
        "ratio_outside_2x_share": float(np.mean(np.abs(log_ratio) > math.log(2))),
        "clip_share": float(np.mean((ratio < 1 - clip_low) | (ratio > 1 + clip_high))),
        "kl": float(-log_ratio.mean()),
        "kl_k3": float(np.mean(np.expm1(bounded) - bounded)),
        "ess": effective_share(log_ratio),
    }


def _buckets(lags: Ints) -> Iterator[tuple[str, Any]]:
    """Yield the name of each non-empty bucket with an index that selects its members."""
    if lags.size:
        yield "all", slice(None)
    for value in np.unique(lags):
        yield f"lag_{value}", lags == value


def _generated(rows: Rows, generated: Sequence[npt.NDArray[np.bool_]]) -> Floats:
    """Return the values of all generated tokens, one trajectory after another."""
    values: Floats = _concat(
        [np.asarray(row)[chosen] for row, chosen in zip(rows, generated, strict=True)], np.float64
    )
    return values


def _concat(parts: Sequence[npt.ArrayLike], dtype: type[np.generic] = np.int64) -> Any:
    # np.concatenate rejects an empty list.
    return np.concatenate([np.empty(0, dtype), *parts]).astype(dtype, copy=False)
