# SPDX-License-Identifier: Apache-2.0
"""Compare a real run's step time with its prediction."""

from __future__ import annotations

import argparse
import json
from statistics import fmean
from typing import Any

from ...config.placement import TEACHER, Placement
from ...console import echo
from ...errors import ConfigError
from .extraction import extract
from .profile import Profile, load
from .run_log import RunLog, read_run
from .simulated.simulation import LEAST_STEPS, simulate
from .simulated.trainer import Setting

SEEDS = 5
"""Simulations per prediction."""


def compare(args: argparse.Namespace) -> int:
    """Run `simulate --against RUN`, with the profile of the run itself or of `--profile`.

    Raises ConfigError if an option contradicts the run.
    """
    for option in ("devices", "strategy", "max_lag", "depth", "pools"):
        if getattr(args, option) is not None:
            raise ConfigError(
                f"--{option.replace('_', '-')} is read from the run with --against, got "
                f"{getattr(args, option)!r}; leave it out"
            )

    run = read_run(args.against)
    facts = side_by_side(run, extract(run) if args.profile is None else load(args.profile), seed=args.seed)
    if args.as_json:
        echo(json.dumps(facts, indent=2))
    else:
        echo(facts["profile"])
        echo(
            f"{facts['strategy']}, max_lag {facts['max_lag']}: predicted {facts['predicted_step_s']:.3f} s "
            f"per step, measured {facts['measured_step_s']:.3f} s, error {facts['error']:+.1%} "
            f"(lag {facts['predicted_lag']:.2f} and {facts['measured_lag']:.2f})"
        )
    return 0


def side_by_side(run: RunLog, profile: Profile, *, seed: int = 1) -> dict[str, Any]:
    """Return both step times over the same window of steps. Raises ConfigError if the run is too short."""
    knobs, ends = run.knobs, run.step_ends_s
    first, last = over = _window(run)
    measured = (ends[last - 1] - ends[first - 1]) / (last - first)

    outcomes = [
        simulate(
            Setting(
                profile=profile,
                # The profile has the teacher's devices.
                placement=Placement(tuple(pool for pool in run.placement.pools if pool.name != TEACHER)),
                knobs=knobs,
                groups=int(run.settings["groups"]),
                steps=len(ends),
                seed=seed + i,
            ),
            over,
        )
        for i in range(SEEDS)
    ]
    predicted = fmean(o.step_s for o in outcomes)
    return {
        "run": run.directory.name,
        "strategy": knobs.strategy,
        "max_lag": knobs.staleness.max_lag,
        "profile": profile.note,
        "predicted_step_s": round(predicted, 6),
        "measured_step_s": round(measured, 6),
        "error": round(predicted / measured - 1, 4),
        "predicted_lag": round(fmean(o.lag_mean for o in outcomes), 4),
        "measured_lag": round(run.lag_mean, 4),
    }


def _window(run: RunLog) -> tuple[int, int]:
    """Return the window of steps that a simulation averages; in a short run, the second half.

    The second half may include steps of the warm-up; the prediction covers the same steps.
    """
    steps, lag = len(run.step_ends_s), run.knobs.staleness.max_lag
    first = min(2 * (lag + 1), steps // 2)
    last = max(first + LEAST_STEPS, steps - (lag + 1))
    if last > steps:
        raise ConfigError(
            f"{run.directory} has {steps} steps, too few after the warm-up; give a run of at least "
            f"{2 * LEAST_STEPS}"
        )
    return first, last
