# SPDX-License-Identifier: Apache-2.0
"""`async-pipeline simulate`: predict a run from a profile, without a device."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from ...config.knobs.schema import AsyncPipelineConfig
from ...config.placement import Placement
from ...console import echo
from ...core.groups.untrained_groups import Straggler
from ...errors import ConfigError
from ..explain.run_plan import drawing
from ..plan.bound import bound_terms, estimate_s
from ..plan.candidates import MEASURED_STEPS, WORK_BATCHES
from ..plan.layout import Rejections, groups_of, knobs_of, placement_of, pools_of, smaller
from ..plan.profile import Profile, load
from ..plan.search import synchronous
from ..plan.simulated.simulation import LEAST_STEPS, SimulatedRun, simulate
from ..plan.simulated.trainer import Setting

DEFAULT_STEPS = 50
ENOUGH_ANSWERS = 150_000
"""Responses to average over in a comparison; on thousands of devices few steps have that many."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `async-pipeline simulate`."""
    parser.add_argument(
        "--profile",
        metavar="FILE",
        help="a profile, or the name of a shipped one (default with --against: the run's)",
    )
    parser.add_argument(
        "--devices", type=int, metavar="N", help="number of devices for training and generation together"
    )
    parser.add_argument(
        "--strategy",
        metavar="S",
        help="on_policy, one_step_off, n_step_ahead, fully_async or module:Class; required, like --profile "
        "and --devices, unless --against is given",
    )

    parser.add_argument(
        "--max-lag",
        type=int,
        metavar="L",
        help="highest allowed lag in policy versions (default: the strategy's)",
    )
    parser.add_argument(
        "--depth",
        type=int,
        metavar="D",
        help="batches in flight or waiting in addition to the one that trains (default: the lag)",
    )

    parser.add_argument(
        "--straggler",
        default="wait",
        choices=get_args(Straggler),
        help="what happens to an unfinished group that holds up a step (default: %(default)s)",
    )
    parser.add_argument(
        "--sync-every",
        type=int,
        default=1,
        metavar="N",
        help="optimizer steps between weight updates (default: %(default)s)",
    )

    parser.add_argument(
        "--pools",
        metavar="{NAME: {...}}",
        help="same format as trainer.v1.async_pipeline.pools (default: two pools, sized by an estimate)",
    )

    parser.add_argument(
        "--steps",
        type=int,
        default=DEFAULT_STEPS,
        metavar="K",
        help="optimizer steps; the averages leave out the first and last ones (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of responses and durations (default: %(default)s)"
    )

    parser.add_argument(
        "--against",
        type=Path,
        metavar="RUN",
        help="run directory whose step time to compare with the prediction for it",
    )
    parser.add_argument("--json", dest="as_json", action="store_true", help="print the figures as JSON")


def run(args: argparse.Namespace) -> int:
    """Simulate and print the figures. Raises ConfigError if the profile, pools or a setting is invalid."""
    if args.against is not None:
        from ..plan.against import compare

        return compare(args)
    for option in ("profile", "devices", "strategy"):
        if getattr(args, option) is None:
            raise ConfigError(f"--{option} is missing; give it, or compare with a run (--against)")
    if args.devices < 2:
        raise ConfigError(
            f"--devices must be >= 2, got {args.devices}; training and generation need one each"
        )
    if args.seed < 0:
        raise ConfigError(f"--seed must be >= 0, got {args.seed}")

    profile = load(args.profile)
    knobs = knobs_of(
        args.strategy, args.max_lag, args.depth, straggler=args.straggler, sync_every=args.sync_every
    )
    placement = placed(profile, args.pools, args.devices, knobs)
    setting = Setting(
        profile=profile,
        placement=placement,
        knobs=knobs,
        groups=groups_of(profile, placement),
        steps=args.steps,
        seed=args.seed,
    )

    started = time.perf_counter()
    outcome, facts = figures(setting)
    facts["wall_s"] = round(time.perf_counter() - started, 3)
    if args.as_json:
        echo(json.dumps(facts, indent=2))
        return 0
    for line in in_words(outcome, facts):
        echo(line)
    return 0


def placed(profile: Profile, pools: str | None, devices: int, knobs: AsyncPipelineConfig) -> Placement:
    """Return the placement of `--pools`, or of two pools split where the estimated step is shortest.

    Raises ConfigError if the pools are invalid, or no split fits.
    """
    if pools is not None:
        return placement_of(profile, _written(pools), devices)

    roles = tuple(role for role in profile.roles() if role != "generate")
    best: tuple[float, Placement] | None = None
    rejections = Rejections()
    for generate in range(profile.devices_per_replica, devices, profile.devices_per_replica):
        layout = rejections.check(profile, pools_of({roles: devices - generate}, generate), devices)
        if layout is None:
            continue
        placement, groups = layout
        setting = Setting(
            profile=profile, placement=placement, knobs=knobs, groups=groups, steps=WORK_BATCHES
        )
        promised = estimate_s(setting) / setting.groups
        if best is None or promised < best[0]:
            best = promised, placement

    if best is None:
        why = f" ({rejections.describe()})" if rejections.tried else ""
        raise ConfigError(
            f"--devices {devices} cannot be split into whole replicas and training devices that divide the "
            f"batch{why}; use another number, or give --pools"
        )
    return best[1]


def _written(pools: str) -> Any:
    """Parse `--pools` as a hydra override, which needs no space after a colon. Raises ConfigError."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(f"pools={pools}").value()
    except HydraException:
        raise ConfigError(
            f"--pools must be a mapping as in a hydra override, got {pools!r}; for example "
            "{train:{roles:[train],devices:2},generate:{roles:[generate],devices:2}}"
        ) from None


def figures(setting: Setting) -> tuple[SimulatedRun, dict[str, Any]]:
    """Simulate `setting`, its synchronous counterpart and the same layout on fewer devices.

    Returns the outcome of `setting` and the figures that `--json` prints.
    """
    outcome = simulate(setting)
    sync = simulate(_long_enough(synchronous(setting), MEASURED_STEPS + setting.steps // 8))
    fewer = smaller(setting)

    linearity = 1.0
    if fewer is not None:
        linearity = (
            outcome.samples_per_device_s / simulate(_long_enough(fewer, setting.steps)).samples_per_device_s
        )
    bound = max(bound_terms(setting).values())
    return outcome, {
        "step_s": round(outcome.step_s, 6),
        "device_s": round(outcome.step_s * setting.placement.devices, 6),
        "bound_s": round(bound, 6),
        "overlap_efficiency": round(min(1.0, bound / outcome.step_s), 4),
        "speedup_vs_sync": round(sync.step_s / outcome.step_s, 4),
        "lag": {"mean": round(outcome.lag_mean, 4), "max": outcome.lag_max},
        "idle": {
            pool: {r: round(share, 4) for r, share in reasons.items()}
            for pool, reasons in outcome.idle.items()
        },
        "linearity": round(linearity, 4),
        "events_per_s": round(outcome.events / outcome.wall_s),
        "wall_s": 0.0,
    }


def _long_enough(setting: Setting, most: int) -> Setting:
    """Return the setting with enough steps to average over enough responses, `most` steps at most."""
    averaged = max(LEAST_STEPS, -(-ENOUGH_ANSWERS // (setting.groups * setting.profile.batch.answers)))
    return replace(setting, steps=min(most, 3 * (setting.knobs.staleness.max_lag + 1) + averaged))


def _lucky(facts: dict[str, Any]) -> str:
    """Return a remark if the averaged steps were faster than the bound, which holds for all steps."""
    if facts["step_s"] >= facts["bound_s"]:
        return ""
    return " (the averaged steps have shorter responses than all steps; raise --steps)"


def in_words(outcome: SimulatedRun, facts: dict[str, Any]) -> list[str]:
    """Return the figures as lines of text."""
    setting, terms = outcome.setting, bound_terms(outcome.setting)
    head, *rest = drawing(setting.placement)
    limit = max(terms, key=lambda name: terms[name])
    lines = [
        f"profile       {setting.profile.note}",
        f"devices       {head}",
        *(f"              {line}" for line in rest),
        f"batch         {setting.groups} prompts x {setting.profile.batch.answers} responses, "
        f"{setting.replicas} replica(s)",
        f"step          {outcome.step_s:.4g} s; the lower bound is {facts['bound_s']:.4g} s ({limit}), "
        f"efficiency {facts['overlap_efficiency']:.0%}{_lucky(facts)}",
        f"cost          {facts['device_s']:.4g} device-seconds per step, "
        f"{outcome.samples_per_device_s:.4g} samples per device-second",
        f"speed-up      {facts['speedup_vs_sync']:.2f} x the best synchronous layout on the same devices",
        f"lag           {outcome.lag_mean:.2f} on average, {outcome.lag_max} at most, "
        f"{setting.knobs.staleness.max_lag} allowed",
    ]
    if (fewer := smaller(setting)) is not None:
        lines.append(
            f"linearity     {facts['linearity']:.2f} (samples per second and device, relative to "
            f"{fewer.placement.devices} devices)"
        )

    for pool, reasons in facts["idle"].items():
        shares = ", ".join(f"{reason} {share:.1%}" for reason, share in reasons.items() if share >= 0.001)
        lines.append(f"idle          {pool}: {shares or 'never'}")
    return [
        *lines,
        f"simulated     {outcome.events} events, {facts['events_per_s']} per second; {facts['wall_s']:.1f} s "
        "in total",
    ]
