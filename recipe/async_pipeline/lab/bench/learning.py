# SPDX-License-Identifier: Apache-2.0
"""`async-pipeline bench learning`: compare the learning curves of strategies, by samples and by time."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from ...console import echo
from ...errors import ConfigError
from ..tables import render_table
from ..tasks.build import ToySpec, ensure_toy
from .inputs.arms import hydra_overrides
from .measuring.machine import machine
from .results.outputs import add_logs_option, check_outputs, job_logs
from .runner import JobFailed, command_of, run_watched

_OWN = "trainer.v1.async_pipeline"
_UNCORRECTED: dict[str, Any] = {"algorithm.rollout_correction.rollout_is": None}
_STEEP: dict[str, Any] = {"actor_rollout_ref.actor.optim.lr": 6.0e-4}
"""Twice the learning rate of the smoke run, at which lag starts to affect learning."""


class Variant(NamedTuple):
    """A strategy with additional settings, and the variant that it is compared with."""

    overrides: Mapping[str, Any]
    yardstick: str = "on_policy"


def _strategy(name: str, max_lag: int | None = None) -> dict[str, Any]:
    lag = {} if max_lag is None else {f"{_OWN}.staleness.max_lag": max_lag}
    return {"async_strategy": name, **lag}


VARIANTS: dict[str, Variant] = {
    "on_policy": Variant(_strategy("on_policy")),
    "one_step_off": Variant(_strategy("one_step_off")),
    "n_step_ahead": Variant(_strategy("n_step_ahead", 3)),
    "fully_async": Variant(_strategy("fully_async", 2)),
    "steep_on_policy": Variant(_strategy("on_policy") | _STEEP, "steep_on_policy"),
    "steep_uncorrected": Variant(_strategy("n_step_ahead", 3) | _STEEP | _UNCORRECTED, "steep_on_policy"),
    "steep_corrected": Variant(_strategy("n_step_ahead", 3) | _STEEP, "steep_on_policy"),
}
"""All variants but `uncorrected` use the truncated importance sampling by token of the smoke run."""


class Curve(NamedTuple):
    """One run: mean reward of each step, and samples trained and seconds since the start of the flow."""

    reward: list[float]
    samples: list[int]
    seconds: list[float]
    lag_mean: float
    lag_max: int

    @property
    def last_fifth(self) -> float:
        """Mean reward over the last fifth of the steps."""
        return fmean(self.reward[-max(1, len(self.reward) // 5) :])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `async-pipeline bench learning`."""
    parser.add_argument(
        "--variants",
        default="on_policy,one_step_off,fully_async",
        metavar="A,B,...",
        help=f"of {', '.join(VARIANTS)} (default: %(default)s)",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        default=3,
        metavar="N",
        help="runs of each, on prompts in another order (default: %(default)s)",
    )
    parser.add_argument(
        "--steps", type=int, default=60, metavar="N", help="optimizer steps of each (default: %(default)s)"
    )
    parser.add_argument(
        "--json",
        type=Path,
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="write all curves to FILE after each run",
    )
    parser.add_argument("--go-on", action="store_true", help="run only what is missing in the file of --json")
    parser.add_argument(
        "--picture",
        type=Path,
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="write a PNG to FILE (default: the file of --json, with the suffix .png)",
    )
    add_logs_option(parser)


def run(args: argparse.Namespace) -> int:
    """Run all variants, seed by seed. Returns 0 if all completed, 1 if some failed."""
    variants = [name.strip() for name in args.variants.split(",")]
    if not set(variants) <= VARIANTS.keys() or args.seeds < 1 or args.steps < 5:
        raise ConfigError(
            f"--variants must be of {', '.join(VARIANTS)}, --seeds >= 1 and --steps >= 5, got "
            f"{args.variants}, {args.seeds}, {args.steps}"
        )

    picture = args.picture or (args.json.with_suffix(".png") if args.json else None)
    check_outputs(args.json, picture, args.logs)
    before = runs_of(args.json, args.steps) if args.go_on else {}

    toy = ensure_toy(
        ToySpec.of(seed=0, tied=True), Path(".cache/toy").resolve(), report=partial(echo, file=sys.stderr)
    )
    data: dict[str, Any] = {
        "machine": machine(),
        "command": "async-pipeline " + " ".join(sys.argv[1:]),
        "steps": args.steps,
        "curves": {**before, **{name: before.get(name, []) for name in variants}},
        "failed": {},
    }
    present = {(curve["seed"], name) for name, curves in before.items() for curve in curves}
    runs = [
        (seed, name) for seed in range(1, args.seeds + 1) for name in variants if (seed, name) not in present
    ]

    with job_logs(args.logs, data["failed"]) as root:
        for number, (seed, name) in enumerate(runs, start=1):
            echo(f"[{number}/{len(runs)}] {name}, seed {seed}; log in {root / f'{seed}-{name}'}")
            try:
                curve = run_variant(name, seed, args.steps, root / f"{seed}-{name}", toy.dir)
            except JobFailed as error:
                echo(f"  failed: {error}")
                data["failed"][f"{name}, seed {seed}"] = str(error)
                continue
            data["curves"][name].append(curve._asdict() | {"seed": seed, "last_fifth": curve.last_fifth})
            echo(
                f"  reward {curve.last_fifth:.3f} in the last fifth, lag {curve.lag_mean:.2f} (max "
                f"{curve.lag_max}), {curve.seconds[-1]:.0f} s"
            )
            if args.json:
                args.json.write_text(json.dumps(data) + "\n", encoding="utf-8")

    echo("\n" + table(data))
    if picture is not None:
        draw(data, picture)
    return 1 if data["failed"] else 0


def runs_of(file: Path | None, steps: int) -> dict[str, list[dict[str, Any]]]:
    """Return the curves in the file of an earlier call.

    Raises ConfigError if there is no such file, it is invalid, or its runs have another number of steps.
    """
    if file is None or not file.is_file():
        raise ConfigError(
            f"--go-on requires the --json file of an earlier call, got {file}; name it, or omit --go-on"
        )
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        found, curves = int(data["steps"]), dict(data["curves"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--json {file} was not written by this command ({error}); name another file, or omit --go-on"
        ) from None
    if found != steps:
        raise ConfigError(f"--steps must be {found}, as in {file}, got {steps}; set --steps {found}")
    return {name: list(runs) for name, runs in curves.items() if name in VARIANTS}


def run_variant(name: str, seed: int, steps: int, directory: Path, task: Path) -> Curve:
    """Run one variant with one seed. Returns its curve. Raises JobFailed if the job fails or hangs."""
    directory.mkdir(parents=True)
    values = {
        "async_pipeline": True,
        **VARIANTS[name].overrides,
        "data.seed": seed,
        "trainer.total_training_steps": steps,
        "trainer.default_local_dir": str(directory / "checkpoints"),
        "ray_kwargs.ray_init.address": "local",
        f"{_OWN}.run_dir": str(directory / "run"),
    }

    command = command_of("verl.trainer.main_ppo", hydra_overrides(values))
    run_watched(
        directory,
        command,
        {"ASYNC_PIPELINE_TASK": str(task)},
        counting=("none", steps, "step"),
        say=lambda text: None,
    )
    return read_curve(directory / "run")


def read_curve(run_dir: Path) -> Curve:
    """Return the curve of a run from its `metrics.jsonl` and `summary.json`."""
    rows = [json.loads(line)["data"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "critic/score/mean" in row]
    summary = json.loads((run_dir / "summary.json").read_text())
    each = summary["samples_trained"] // summary["steps"]
    seconds, now = [], 0.0
    for row in rows:
        now += row["timing_s/step"]
        seconds.append(now)

    return Curve(
        reward=[row["critic/score/mean"] for row in rows],
        samples=[each * number for number in range(1, len(rows) + 1)],
        seconds=seconds,
        lag_mean=fmean(row["async_pipeline/lag/mean"] for row in rows),
        lag_max=summary["lag_max"],
    )


def table(data: Mapping[str, Any]) -> str:
    """Return a Markdown table: final reward, and the difference to the yardstick, paired by seed."""
    rows = []
    for name, curves in data["curves"].items():
        if not curves:
            continue

        ends = {curve["seed"]: curve["last_fifth"] for curve in curves}
        yardstick = {c["seed"]: c["last_fifth"] for c in data["curves"].get(VARIANTS[name].yardstick, [])}
        paired = [ends[seed] - yardstick[seed] for seed in ends if seed in yardstick]
        rows.append(
            [
                f"`{name}`",
                ", ".join(f"{end:.3f}" for end in ends.values()),
                f"{fmean(ends.values()):.3f}",
                _range(paired) if paired and name != VARIANTS[name].yardstick else "",
                f"{fmean(c['lag_mean'] for c in curves):.2f}",
                _range([c["seconds"][-1] for c in curves], 0),
            ]
        )
    header = ["variant", "reward in the last fifth, by seed", "mean", "minus yardstick, paired"]
    return render_table([*header, "lag, mean", "seconds"], rows)


def _range(values: Sequence[float], digits: int = 3) -> str:
    return f"{fmean(values):.{digits}f} [{min(values):.{digits}f} .. {max(values):.{digits}f}]"


def draw(data: Mapping[str, Any], path: Path) -> None:
    """Draw reward over samples and over time: the mean of all seeds, and each seed as a thin line."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, both = pyplot.subplots(1, 2, figsize=(12, 4.5), sharey=True, layout="constrained")
    for number, (name, curves) in enumerate(data["curves"].items()):
        for axes, over in zip(both, ("samples", "seconds"), strict=True):
            for curve in curves:
                axes.plot(curve[over], _smooth(curve["reward"]), color=f"C{number}", alpha=0.3, linewidth=0.8)
            if curves:
                steps = range(min(len(curve["reward"]) for curve in curves))
                middle = [fmean(_smooth(curve["reward"])[step] for curve in curves) for step in steps]
                at = [fmean(curve[over][step] for curve in curves) for step in steps]
                axes.plot(at, middle, color=f"C{number}", linewidth=2, label=name)
            axes.set_xlabel(f"{over} {'trained' if over == 'samples' else 'since the start of the flow'}")

    both[0].set_ylabel("reward, mean of five steps")
    both[0].legend(frameon=False)
    for axes in both:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _smooth(values: Sequence[float], width: int = 5) -> list[float]:
    return [fmean(values[max(0, at - width + 1) : at + 1]) for at in range(len(values))]
