# SPDX-License-Identifier: Apache-2.0
"""The metrics of a batch match a loop over its tokens."""

from __future__ import annotations

import math
import tracemalloc
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.async_pipeline.core.groups.items import Trajectory, spans_of
from recipe.async_pipeline.errors import StalenessViolation
from recipe.async_pipeline.observe.samples.off_policy import (
    CHUNK_TOKENS,
    Columns,
    OffPolicyMeter,
)

TRAINER, MAX_LAG = 7, 3
Floats = npt.NDArray[np.float64]


def written_by(first: int, last: int, spans: Sequence[Sequence[int]] | None) -> Trajectory:
    known = None if spans is None else spans_of(spans)
    return Trajectory(key="", first_version=first, last_version=last, num_tokens=0, spans=known)


@dataclass
class Response:
    """One response token by token; tokens of tools have version None."""

    versions: list[int | None]
    spans: list[list[int]] | None
    known: bool
    rollout: list[float]
    old: list[float]

    @property
    def written(self) -> list[int]:
        return [v for v in self.versions if v is not None]

    def trajectory(self) -> Trajectory:
        return written_by(
            first=min(self.written, default=TRAINER),
            last=max(self.written, default=TRAINER),
            spans=self.spans,
        )

    def lags(self) -> list[int]:
        """Return the lag of each generated token; without complete spans, the lag of the oldest."""
        return [TRAINER - (v if self.known else min(self.written)) for v in self.written]

    def pairs(self) -> list[tuple[float, float]]:
        return [
            (r, o) for v, r, o in zip(self.versions, self.rollout, self.old, strict=True) if v is not None
        ]


LOG_PROBS = st.floats(-6, 0) | st.sampled_from([math.nan, -math.inf, math.inf])


@st.composite
def responses(draw: st.DrawFn) -> Response:
    """Draw turns of one or more spans with tools between them; keep spans of all, the first or no turn."""
    versions: list[int | None] = []
    spans: list[list[int]] = []
    of_first = 0

    for turn in range(draw(st.integers(1, 3))):
        if turn:
            versions += [None] * draw(st.integers(1, 3))
        for _ in range(draw(st.integers(1, 3))):
            version = draw(st.integers(TRAINER - MAX_LAG, TRAINER))
            spans.append([version, len(versions)])
            versions += [version] * draw(st.integers(1, 4))
        of_first = of_first or len(spans)

    kept = draw(st.sampled_from(["all", "first turn", "none"]))
    log_probs = st.lists(LOG_PROBS, min_size=len(versions), max_size=len(versions))
    return Response(
        versions=versions,
        spans={"all": spans, "first turn": spans[:of_first], "none": None}[kept],
        known=kept == "all" or (kept == "first turn" and None not in versions),
        rollout=draw(log_probs),
        old=draw(log_probs),
    )


def one(versions: Sequence[int], log_ratios: Sequence[float] | None = None) -> Response:
    """Return a response of a single turn; the default log-ratio is 0."""
    ratios = list(log_ratios or [0.0] * len(versions))
    starts = [i for i, v in enumerate(versions) if i == 0 or versions[i - 1] != v]
    return Response(
        list(versions),
        [[versions[i], i] for i in starts],
        True,
        [-1.0] * len(ratios),
        [r - 1.0 for r in ratios],
    )


def off_policy_metrics(
    trajectories: list[Trajectory],
    *,
    mask: Iterable[npt.ArrayLike],
    rollout_log_probs: Iterable[npt.ArrayLike] | None = None,
    old_log_probs: Iterable[npt.ArrayLike] | None = None,
    **settings: Any,
) -> dict[str, float]:
    """Return the metrics of a batch that is in memory."""
    lengths = np.array([len(np.asarray(row)) for row in mask], np.int64)
    given = [mask]
    if rollout_log_probs is not None and old_log_probs is not None:
        given += [rollout_log_probs, old_log_probs]
    columns = [np.concatenate([np.zeros(0), *(np.asarray(row) for row in rows)]) for rows in given]
    meter = OffPolicyMeter(**settings)
    meter.add(trajectories, Columns(lengths, *columns))
    return meter.metrics()


def measured(*batch: Response, padding: int | None = None) -> dict[str, float]:
    """Return the metrics of a batch as ragged rows, or padded with values that must not count."""
    width = max((len(r.versions) for r in batch), default=0) + (padding or 0)
    missing = [width - len(r.versions) if padding is not None else 0 for r in batch]

    return off_policy_metrics(
        [r.trajectory() for r in batch],
        trainer_version=TRAINER,
        max_lag=MAX_LAG,
        mask=[
            [float(v is not None) for v in r.versions] + [0.0] * n
            for r, n in zip(batch, missing, strict=True)
        ],
        rollout_log_probs=np.array([r.rollout + [math.nan] * n for r, n in zip(batch, missing, strict=True)])
        if padding is not None
        else [r.rollout for r in batch],
        old_log_probs=[r.old + [9.0] * n for r, n in zip(batch, missing, strict=True)],
    )


def only(metrics: dict[str, float], prefix: str) -> dict[str, float]:
    return {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}


# Comparison with loops over tokens.


def percentile(lags: list[int]) -> int:
    return next(k for k in range(100) if 100 * sum(value <= k for value in lags) >= 95 * len(lags))


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(st.lists(responses(), min_size=1, max_size=5), st.sampled_from([None, 0, 2]))
def test_lags_match_a_loop_over_tokens(batch: list[Response], padding: int | None) -> None:
    metrics = measured(*batch, padding=padding)
    by_token = [lag for r in batch for lag in r.lags()]
    by_trajectory = [TRAINER - min(r.written) for r in batch]

    for prefix, share, lags in (("token_", "token", by_token), ("", "trajectory", by_trajectory)):
        assert metrics[f"lag/{prefix}mean"] == pytest.approx(sum(lags) / len(lags))
        assert metrics[f"lag/{prefix}max"] == max(lags)
        assert metrics[f"lag/{prefix}p95"] == percentile(lags)
        counts = Counter(lags)
        shares = {str(k): pytest.approx(counts[k] / len(lags)) for k in range(MAX_LAG + 1)}
        assert only(metrics, f"lag/{share}_share/") == shares

    assert metrics["lag/trajectories_without_spans"] == sum(not r.known for r in batch)
    assert metrics["lag/mixed_version_share"] == pytest.approx(
        sum(len(set(r.written)) > 1 for r in batch) / len(batch)
    )

    spans = [
        1 + sum(a != b for a, b in zip(r.written, r.written[1:], strict=False)) for r in batch if r.known
    ]
    if spans:
        assert metrics["lag/spans_mean"] == pytest.approx(sum(spans) / len(spans))
        assert metrics["lag/spans_max"] == max(spans)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(st.lists(responses(), min_size=1, max_size=5), st.sampled_from([None, 0, 2]))
def test_ratios_match_a_loop_over_tokens(batch: list[Response], padding: int | None) -> None:
    buckets: dict[str, list[float]] = {}
    weights: dict[str, list[float]] = {}
    lost = total = 0

    for response in batch:
        summed: list[float] = []
        for lag, (rollout, old) in zip(response.lags(), response.pairs(), strict=True):
            total += 1
            if math.isfinite(rollout) and math.isfinite(old):
                summed.append(old - rollout)
                for bucket in ("all", f"lag_{lag}"):
                    buckets.setdefault(bucket, []).append(old - rollout)
            else:
                lost += 1
        if summed:
            for bucket in ("all", f"lag_{TRAINER - min(response.written)}"):
                weights.setdefault(bucket, []).append(math.exp(math.fsum(summed)))

    expected = {
        f"{name}/{bucket}": pytest.approx(value, rel=1e-6, abs=1e-12)
        for bucket, logs in buckets.items()
        for name, value in by_loop(logs).items()
    }
    for bucket, values in weights.items():
        expected[f"trajectory_ess/{bucket}"] = pytest.approx(share_by_loop(values))
    expected["non_finite_share"] = pytest.approx(lost / total)
    assert only(measured(*batch, padding=padding), "off_policy/") == expected


def by_loop(logs: list[float]) -> dict[str, float]:
    ratios = [math.exp(x) for x in logs]
    n = len(logs)
    return {
        "ratio_mean": sum(ratios) / n,
        "ratio_max": max(ratios),
        "ratio_outside_2x_share": sum(not 0.5 <= r <= 2 for r in ratios) / n,
        "clip_share": sum(not 0.8 <= r <= 1.2 for r in ratios) / n,
        "kl": -sum(logs) / n,
        "kl_k3": sum(r - 1 - x for r, x in zip(ratios, logs, strict=True)) / n,
        "ess": share_by_loop(ratios),
    }


def share_by_loop(weights: list[float]) -> float:
    return sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights))


# The version of each token.


def test_a_span_behind_a_truncated_response_has_no_tokens() -> None:
    described = written_by(first=6, last=7, spans=[[6, 0], [7, 2]])
    metrics = off_policy_metrics([described], trainer_version=TRAINER, max_lag=1, mask=[[1, 1]])
    assert metrics["lag/token_share/1"] == 1
    assert metrics["lag/spans_max"] == 1


@pytest.mark.parametrize(("old", "p95"), [(1, 0), (2, 3)])
def test_p95_is_the_smallest_lag_that_95_percent_do_not_exceed(old: int, p95: int) -> None:
    metrics = measured(*[one([7])] * (20 - old), *[one([4])] * old)
    assert (metrics["lag/p95"], metrics["lag/token_p95"]) == (p95, p95)


def test_a_lag_beyond_the_bound_has_its_share() -> None:
    shares = only(measured(one([2, 7])), "lag/token_share/")
    assert shares == {"0": 0.5, "1": 0, "2": 0, "3": 0, "4": 0, "5": 0.5}


@pytest.mark.parametrize("versions", [[8, 8], [7, 8]])
def test_a_token_newer_than_the_trainer_is_an_error(versions: list[int]) -> None:
    with pytest.raises(StalenessViolation, match="version 7, but its batch contains version 8"):
        measured(one(versions))


# Edge cases.


def test_an_empty_batch_gives_only_counts() -> None:
    assert measured() == {"lag/trajectories_without_spans": 0, "off_policy/non_finite_share": 0}


@pytest.mark.parametrize("mask", [[], [0, 0]])
def test_a_trajectory_without_tokens_has_a_lag_but_no_token_metrics(mask: list[int]) -> None:
    described = written_by(first=6, last=6, spans=[[6, 0]])
    metrics = off_policy_metrics(
        [described],
        trainer_version=TRAINER,
        max_lag=1,
        mask=[mask],
        rollout_log_probs=[[0.0] * len(mask)],
        old_log_probs=[[0.0] * len(mask)],
    )
    assert metrics["lag/mean"] == 1
    assert not only(metrics, "lag/token_share/")
    assert only(metrics, "off_policy/") == {"non_finite_share": 0}


def test_without_log_probs_only_lags_are_reported() -> None:
    metrics = off_policy_metrics(
        [one([7]).trajectory()], trainer_version=TRAINER, max_lag=1, mask=[[1]], old_log_probs=[[0.0]]
    )
    assert metrics
    assert not only(metrics, "off_policy/")


def test_a_batch_without_finite_log_probs_has_no_ratio_metrics() -> None:
    assert only(measured(one([6], [math.nan])), "off_policy/") == {"non_finite_share": 1}


@pytest.mark.parametrize("extreme", [800.0, -800.0])
def test_an_extreme_ratio_keeps_all_metrics_finite(extreme: float) -> None:
    metrics = measured(one([7, 6], [extreme, 0.0]), one([7, 7]))
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["off_policy/kl/all"] == -extreme / 4


def test_the_clip_bounds_may_be_asymmetric() -> None:
    response = one([7] * 4, [math.log(r) for r in (0.7, 0.85, 1.25, 1.4)])
    shares = [
        off_policy_metrics(
            [response.trajectory()],
            trainer_version=TRAINER,
            max_lag=0,
            mask=np.ones((1, 4)),
            rollout_log_probs=np.array([response.rollout]),
            old_log_probs=np.array([response.old], dtype=np.float32),
            clip_low=low,
            clip_high=high,
        )["off_policy/clip_share/all"]
        for low, high in ((0.2, 0.2), (0.2, 0.3), (0.1, 0.5), (1.0, 1.0))
    ]
    assert shares == [0.75, 0.5, 0.5, 0]


def test_shapes_must_agree() -> None:
    described = [one([7, 7]).trajectory()]
    with pytest.raises(ValueError, match="1 trajectories have a mask of 2 rows and 3 tokens"):
        off_policy_metrics(described, trainer_version=TRAINER, max_lag=0, mask=[[1, 1], [1]])


def test_effective_share_of_equal_weights_and_of_one_dominant_weight() -> None:
    equal = measured(one([7] * 10, [5000.0] * 10))
    assert equal["off_policy/ess/all"] == 1
    dominant = measured(one([7] * 4, [900.0, 0.0, 0.0, 0.0]))
    assert dominant["off_policy/ess/all"] == pytest.approx(1 / 4)


# float32, in pieces.

TOLERANCE = 1e-5
"""Relative, against float64 throughout; documented in `off_policy`."""


def in_float64(old: Floats, rollout: Floats) -> dict[str, float]:
    """Return the metrics of tokens of one lag as float64 gives them."""
    with np.errstate(invalid="ignore"):
        log_ratio = old - rollout
    log_ratio = log_ratio[np.isfinite(old) & np.isfinite(rollout)]
    bounded = log_ratio.clip(-20, 20)
    ratio = np.exp(bounded)
    weights = np.exp(log_ratio - log_ratio.max())
    return {
        "ratio_mean": float(ratio.mean()),
        "ratio_max": float(ratio.max()),
        "ratio_outside_2x_share": float(np.mean(np.abs(log_ratio) > math.log(2))),
        "clip_share": float(np.mean((ratio < 0.8) | (ratio > 1.2))),
        "kl": float(-log_ratio.mean()),
        "kl_k3": float(np.mean(np.expm1(bounded) - bounded)),
        "ess": float(weights.sum() ** 2 / (weights.size * (weights**2).sum())),
    }


@settings(max_examples=80, deadline=None, database=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    tokens=st.integers(1, 3000),
    sampled=st.sampled_from([0.1, 1.0, 30.0, 1e4]),
    moved=st.sampled_from([0.0, 1e-7, 1e-4, 0.01, 0.3, 3.0, 40.0, 3000.0, 1e30]),
    extremes=st.lists(
        st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -1e-38, -745.0, -3e38, 3e38, 0.5, -0.5]),
        max_size=8,
    ),
)
def test_float32_differs_from_float64_by_less_than_the_tolerance(
    seed: int, tokens: int, sampled: float, moved: float, extremes: list[float]
) -> None:
    drawn = np.random.default_rng(seed)
    rollout = -drawn.exponential(sampled, tokens + len(extremes)).astype(np.float32)
    old = (rollout + drawn.normal(0, moved, rollout.size)).astype(np.float32)
    old[tokens:] = extremes
    described = written_by(first=TRAINER, last=TRAINER, spans=[[TRAINER, 0]])
    metrics = off_policy_metrics(
        [described],
        trainer_version=TRAINER,
        max_lag=0,
        mask=[np.ones(rollout.size)],
        rollout_log_probs=[rollout],
        old_log_probs=[old],
    )
    for name, value in in_float64(old.astype(np.float64), rollout.astype(np.float64)).items():
        assert metrics[f"off_policy/{name}/all"] == pytest.approx(value, rel=TOLERANCE, abs=1e-14), name


@settings(max_examples=40, deadline=None, database=None, derandomize=True)
@given(st.lists(responses(), min_size=2, max_size=6), st.data())
def test_a_batch_may_be_added_in_any_number_of_parts(batch: list[Response], data: st.DataObject) -> None:
    meter = OffPolicyMeter(trainer_version=TRAINER, max_lag=MAX_LAG)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(batch) - 1))))
    for begin, end in zip([0, *cuts], [*cuts, len(batch)], strict=True):
        part = batch[begin:end]
        columns = Columns(
            np.array([len(r.versions) for r in part]),
            np.array([v is not None for r in part for v in r.versions]),
            np.array([value for r in part for value in r.rollout]),
            np.array([value for r in part for value in r.old]),
        )
        meter.add([r.trajectory() for r in part], columns)
    expected = {name: pytest.approx(value, rel=1e-6) for name, value in measured(*batch).items()}
    assert meter.metrics() == expected


def peak_bytes(chunks: int) -> int:
    """Return the peak of the memory that a batch of so many chunks needs besides its columns."""
    length = 512
    rows = chunks * CHUNK_TOKENS // length
    drawn = np.random.default_rng(0)
    rollout = drawn.normal(-1, 0.5, rows * length).astype(np.float32)
    old = rollout + np.float32(0.01)
    columns = Columns(np.full(rows, length), np.ones(rows * length, np.int64), rollout, old)
    described = [
        written_by(first=5 + i % 3, last=7, spans=[[5 + i % 3, 0], [7, 300]][: 1 + (i % 3 < 2)])
        for i in range(rows)
    ]
    meter = OffPolicyMeter(trainer_version=TRAINER, max_lag=MAX_LAG)
    tracemalloc.start()
    try:
        meter.add(described, columns)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_the_batch() -> None:
    small, large = peak_bytes(2), peak_bytes(16)
    assert large < 1.1 * small + 64 * 1024
    assert large < 100 * CHUNK_TOKENS
