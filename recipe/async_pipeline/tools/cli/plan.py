# SPDX-License-Identifier: Apache-2.0
"""`async-pipeline plan`: the best split, pools, strategy and lag, or why not to use the pipeline."""

from __future__ import annotations

import argparse
import json
import math
import sys
from typing import Any

from ...config.knobs.schema import MOST_LAG
from ...console import echo
from ...errors import ConfigError
from ..plan.bound import bound_s
from ..plan.candidates import MOST_DEVICES
from ..plan.explanation import explained
from ..plan.profile import load, shipped_names
from ..plan.search import DEFAULT_MAX_LAG, SEEDS, T_95, SearchResult, SimulatedCandidate, overrides, plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `async-pipeline plan`."""
    parser.add_argument(
        "--profile",
        required=True,
        metavar="FILE",
        help="costs of your run, made by `async-pipeline profile RUN`, or a shipped example: "
        + shipped_names(),
    )
    parser.add_argument(
        "--devices",
        type=int,
        required=True,
        metavar="N",
        help="number of devices for training and generation together",
    )

    parser.add_argument(
        "--max-lag",
        type=int,
        default=DEFAULT_MAX_LAG,
        metavar="L",
        help="highest allowed age of a sample in policy versions (default: %(default)s)",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        default=SEEDS,
        metavar="N",
        help=f"simulations of each finalist, from 3 to {max(T_95)} (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of the first simulation (default: %(default)s)"
    )

    parser.add_argument(
        "--apply", action="store_true", help="print the overrides to paste into a training command"
    )
    parser.add_argument("--json", dest="as_json", action="store_true", help="print the plan as JSON")


def run(args: argparse.Namespace) -> int:
    """Search and print the plan. Raises ConfigError if the profile is invalid or no layout fits."""
    for option, least, most in (
        ("devices", 2, MOST_DEVICES),
        ("max_lag", 0, MOST_LAG),
        ("seeds", 3, max(T_95)),
        ("seed", 0, math.inf),
    ):
        value, name = getattr(args, option), f"--{option.replace('_', '-')}"
        if value < least:
            raise ConfigError(f"{name} must be >= {least}, got {value}")
        if value > most:
            raise ConfigError(f"{name} must be at most {most}, got {value}; a search for more takes too long")

    profile = load(args.profile)
    found = plan(
        profile, args.devices, max_lag=args.max_lag, seeds=args.seeds, seed=args.seed, say=show_progress
    )
    if args.as_json:
        echo(
            json.dumps(
                as_json(found)
                | (
                    {"overrides": overrides(found.found[0]) if found.verdict == "async" else []}
                    if args.apply
                    else {}
                ),
                indent=2,
            )
        )
        return 0

    if args.apply:
        if found.verdict == "sync":
            echo(f"# nothing to apply: {found.why}")
        else:
            echo(" \\\n".join(_quoted(line) for line in overrides(found.found[0])))
        return 0

    for line in in_words(found, profile.note):
        echo(line)
    return 0


def show_progress(text: str) -> None:
    """Write to stderr: one line that is overwritten on a terminal, otherwise a line each."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
    elif text:
        sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def as_json(found: SearchResult) -> dict[str, Any]:
    """Return the plan for `--json`.

    If the verdict is sync, the best asynchronous layout is the first alternative.
    """
    best = found.found[0]
    paid = found.verdict == "async"

    return {
        "recommendation": layout_of(best)
        if paid
        else {"strategy": "sync", "devices": best.candidate.setting.placement.devices},
        "predicted": predicted(best) if paid else predicted_sync(best),
        "alternatives": [layout_of(other) | predicted(other) for other in found.found[paid:]],
        "verdict": found.verdict,
        "why": found.why,
        "explanation": explained(found),
    }


def layout_of(found: SimulatedCandidate) -> dict[str, Any]:
    """Return the settings of a layout."""
    setting = found.candidate.setting
    return {
        "strategy": setting.knobs.strategy,
        "max_lag": setting.knobs.staleness.max_lag,
        "depth": setting.knobs.staleness.depth,
        "shape": found.candidate.shape,
        "pools": {p.name: {"roles": list(p.roles), "devices": p.devices} for p in setting.placement.pools},
        "idle_devices": found.candidate.idle,
        "groups": setting.groups,
    }


def predicted(found: SimulatedCandidate) -> dict[str, Any]:
    """Return the predicted performance of a layout."""
    low, high = found.interval
    bound = found.bound_s

    return {
        "step_s": round(found.step_s, 6),
        "bound_s": round(bound, 6),
        "overlap_efficiency": round(bound / found.step_s, 4),
        "speedup_vs_sync": round(found.speedup, 4),
        "interval": [round(low, 4), round(high, 4)],
        "lag": {
            "mean": round(sum(o.lag_mean for o in found.outcomes) / len(found.outcomes), 4),
            "max": max(o.lag_max for o in found.outcomes),
        },
        "limited_by": found.candidate.limit,
        "seeds": len(found.outcomes),
    }


def predicted_sync(found: SimulatedCandidate) -> dict[str, Any]:
    """Return the prediction for the synchronous layout, in which all devices generate and then train."""
    setting = found.sync[0].setting
    return {
        "step_s": round(found.sync_step_s, 6),
        "bound_s": round(bound_s(setting), 6),
        "groups": setting.groups,
        "lag": {"mean": 0.0, "max": 0},
        "seeds": len(found.sync),
    }


LEGEND = (
    "depth: batches ahead of the one that trains; pools: stages and their devices",
    "step s: simulated seconds of an optimizer step, mean over the seeds",
    "speed-up: step time of the best synchronous layout, with the same batches on as many devices, by step s",
    "95 %: confidence interval of the speed-up, over the seeds",
    "lag: policy versions between the one that wrote a sample and the one that it trains, mean",
    "of bound: the shortest step that devices and dependencies allow, as a share of step s",
)
"""The columns of the table, in words."""


def in_words(found: SearchResult, note: str) -> list[str]:
    """Return the plan as lines of text."""
    head = (
        f"{'strategy':<14}{'max_lag':>7} {'depth':>5}  {'pools':<44}{'step s':>9} {'speed-up':>8} "
        f"{'95 %':>15} {'lag':>5} {'of bound':>8}"
    )

    return [
        f"profile: {note}",
        f"{found.verdict}: {found.why}",
        f"the best synchronous layout takes {found.found[0].sync_step_s:.4g} s per step",
        f"candidates: {found.considered}, of these {found.ruled_out} ruled out by their bounds, "
        f"{found.simulated} simulated",
        "",
        head,
        *(_row(one) for one in found.found),
        *LEGEND,
        "",
        *explained(found),
    ]


def _row(found: SimulatedCandidate) -> str:
    knobs, facts = found.candidate.setting.knobs, predicted(found)
    pools = " ".join(
        f"{'+'.join(p.roles) if p.name != 'generate' else p.name}:{p.devices}"
        for p in found.candidate.setting.placement.pools
    )
    pools += f" idle:{found.candidate.idle}" if found.candidate.idle else ""
    depth = knobs.staleness.batches_ahead
    low, high = facts["interval"]
    return (
        f"{knobs.strategy:<14}{knobs.staleness.max_lag:>7} {depth:>5}  {pools:<44}{facts['step_s']:>9.4g} "
        f"{facts['speedup_vs_sync']:>8.2f} "
        f"{f'[{low:.2f} .. {high:.2f}]':>15} {facts['lag']['mean']:>5.2f} {facts['overlap_efficiency']:>8.0%}"
    )


def _quoted(override: str) -> str:
    return f"'{override}'" if set(override) & set("{}[],") else override
