# SPDX-License-Identifier: Apache-2.0
"""`async-pipeline bench`: run arms in turns; print a table, write a JSON file and a chart."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from ...console import echo
from ...errors import ConfigError
from ..bench import arena, attention, checkpoint, control_plane, delta, gateway, learning, weight_sync
from ..bench.inputs.arms import ARMS, DEFAULT_ARMS, ENGINES, arms_of_engine, parse_arms
from ..bench.inputs.workload import Workload, load, names
from ..bench.measuring.measure import Measured
from ..bench.results.outputs import check_outputs, job_logs
from ..bench.results.picture import draw
from ..bench.results.report import report, table
from ..bench.runner import Job, JobFailed, jobs_in_turns, run_job
from ..tasks.build import Spec, ToySpec, ensure_toy

_OTHERS: Mapping[str, tuple[Any, str]] = {
    "weight-sync": (
        weight_sync,
        "the cost of a weight update, with this package's transports and with verl's, on real engines",
    ),
    "control-plane": (
        control_plane,
        "what a trajectory costs besides engine and trainer, with engines and training that cost nothing",
    ),
    "checkpoint": (checkpoint, "what a checkpoint of many tokens costs the process of the trainer"),
    "gateway": (gateway, "what a request of an agent costs the process that serves it"),
    "learning": (learning, "whether asynchrony preserves learning, per sample and per second"),
    "delta": (delta, "what differences between versions save on the link, and what they cost"),
    "attention": (attention, "what a mask over all pairs of a packed micro-batch costs, without flash-attn"),
    "arena": (arena, "the speed of copying weights from a device to host memory and back, with torch alone"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `async-pipeline bench`."""
    parser.add_argument(
        "--workload",
        default="agentic_wait",
        metavar="NAME",
        help=f"one of {', '.join(names())}, or a YAML file (default: %(default)s)",
    )
    parser.add_argument(
        "--arms",
        metavar="A,B,...",
        help=f"arms to run, in this order: any of {', '.join(ARMS)} (default: all that the engine runs, "
        f"except {', '.join(arm for arm in ARMS if arm not in DEFAULT_ARMS)})",
    )
    parser.add_argument(
        "--engine",
        # Another name than the one of `weight-sync`, whose default would replace this value.
        dest="engine_of_arms",
        choices=ENGINES,
        default=ENGINES[0],
        help="rollout engine; sglang runs the arms with separate devices (default: %(default)s)",
    )

    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="optimizer steps to measure, warm-up not included (default: the workload's)",
    )
    parser.add_argument(
        "--repeats", type=int, default=3, metavar="R", help="runs of each arm (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of prompts and waits (default: %(default)s)"
    )

    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write all measurements to FILE, after each job"
    )
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="write a PNG chart (default: next to --json)"
    )
    parser.add_argument(
        "--logs",
        type=Path,
        metavar="DIR",
        help="keep the output of the jobs in DIR (default: kept only if a job fails)",
    )

    parser.add_argument(
        "--no-stock-poll",
        action="store_true",
        help="skip the extra run of verl's arms with their polling interval as shipped",
    )
    measurements = parser.add_subparsers(dest="instead", title="other measurements")
    for name, (module, text) in _OTHERS.items():
        module.add_arguments(measurements.add_parser(name, help=text, description=text))


def run(args: argparse.Namespace) -> int:
    """Run all jobs. Returns 0 if every arm completed, 1 if one failed."""
    if args.instead is not None:
        for option, default in (
            ("workload", "agentic_wait"),
            ("arms", None),
            ("engine_of_arms", ENGINES[0]),
            ("repeats", 3),
            ("no_stock_poll", False),
        ):
            if getattr(args, option) != default:
                name = option.removesuffix("_of_arms").replace("_", "-")
                own = name == "engine" and hasattr(args, name)
                raise ConfigError(
                    f"--{name} is an option of `bench` itself, not of {args.instead}; "
                    + (f"put it after {args.instead}, which has one, too" if own else "leave it out")
                )
        status: int = _OTHERS[args.instead][0].run(args)
        return status

    arms = arms_of_engine(None if args.arms is None else parse_arms(args.arms), args.engine_of_arms)
    workload = load(args.workload)
    for option in ("repeats", "steps"):
        value = getattr(args, option)
        if value is not None and value < 1:
            raise ConfigError(f"--{option} must be >= 1, got {value}; use 1 or more")
    if args.steps is not None:
        workload = msgspec.structs.replace(workload, steps=args.steps)
    require_arms_for(arms, workload)
    workload = with_room_for(arms, workload)

    picture = args.picture or (args.json.with_suffix(".png") if args.json else None)
    check_outputs(args.json, picture, args.logs)
    failed: dict[str, str] = {}
    with job_logs(args.logs, failed) as root:
        data = _run_all(args, arms, workload, root, failed)

    echo("\n" + table(data))
    if picture is not None and data["arms"]:
        draw(data, picture)
        echo(f"\npicture: {picture}")
    return 1 if data["failed"] else 0


def require_arms_for(arms: Sequence[str], workload: Workload) -> None:
    """Raises ConfigError if an arm cannot do the work."""
    unable = [arm for arm in arms if workload.task is not None and not ARMS[arm].uses_pipeline]
    if unable:
        able = ",".join(arm for arm in ARMS if ARMS[arm].uses_pipeline)
        raise ConfigError(
            f"--arms must be of this package for a workload of {workload.task}s, which verl's trainers do "
            f"not train, got {','.join(unable)}; use some of {able}"
        )


def with_room_for(arms: Sequence[str], workload: Workload) -> Workload:
    """Return the workload with enough steps before and after to fill and drain the deepest pipeline."""
    deepest = max(ARMS[arm].batches_in_flight for arm in arms)
    return msgspec.structs.replace(
        workload, warmup=max(workload.warmup, deepest), cooldown=max(workload.cooldown, deepest)
    )


def _run_all(
    args: argparse.Namespace, arms: list[str], workload: Workload, root: Path, failed: dict[str, str]
) -> dict[str, Any]:
    """Run the jobs in turns; return all measurements, also written to `--json` after each job."""
    task = ensure_toy(_task_of(workload), Path(".cache/toy").resolve(), report=partial(echo, file=sys.stderr))

    jobs = jobs_in_turns(
        arms, args.repeats, root, stock_poll=not args.no_stock_poll, engine=args.engine_of_arms
    )
    done: dict[str, list[Measured]] = {arm: [] for arm in arms}
    stock: dict[str, Measured] = {}
    data: dict[str, Any] = {}
    started = time.monotonic()
    echo(
        f"{args.workload}: {workload.reason}\n{len(jobs)} jobs of {workload.total_steps} steps; logs in "
        f"{root}"
    )
    for number, job in enumerate(jobs, start=1):
        if job.arm in failed:
            continue

        what = f"turn {job.turn}" if job.turn else "polling interval as shipped"
        echo(f"[{number}/{len(jobs)}] {job.arm}, {what} ({time.monotonic() - started:.0f} s so far)")
        try:
            measured = _run_twice_at_most(job, workload, args.seed, task.dir)
        except JobFailed as error:
            failed[job.arm] = str(error)
            echo(f"  failed again: {error}")
        else:
            echo(f"  {_line(measured)}")
            if job.turn:
                done[job.arm].append(measured)
            else:
                stock[job.arm] = measured

        data = report(
            args.workload,
            workload,
            _complete(done, failed),
            seed=args.seed,
            command="async-pipeline " + " ".join(sys.argv[1:]),
            failed=failed,
            stock_poll=stock,
        )
        data["engine"] = args.engine_of_arms
        data["complete"] = number == len(jobs)
        if args.json:
            args.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return data


def _task_of(workload: Workload) -> Spec:
    """Return the data and the model of a workload."""
    if workload.task == "image":
        # Its parts need diffusers, an optional package.
        from ..tasks.image_task.image_build import ImageSpec

        return ImageSpec()
    if workload.episode.environment is None:
        return ToySpec.of(seed=0, tied=True)
    # It needs gymnasium, an optional package.
    from ..tasks.lake_task.lake_build import LakeSpec

    return LakeSpec()


def _run_twice_at_most(job: Job, workload: Workload, seed: int, task: Path) -> Measured:
    """Run a job, again if it fails: one accident of the machine should not cost an arm all its turns."""
    try:
        return run_job(job, workload, seed, task, echo)
    except JobFailed as error:
        echo(f"  failed, retrying: {error}")
        return run_job(
            job._replace(directory=job.directory.with_name(f"{job.directory.name}-again")),
            workload,
            seed,
            task,
            echo,
        )


def _complete(done: Mapping[str, list[Measured]], failed: Mapping[str, str]) -> dict[str, list[Measured]]:
    """Return the arms that can be compared, each cut to the number of turns that all of them completed."""
    alive = {arm: turns for arm, turns in done.items() if turns and arm not in failed}
    common = min((len(turns) for turns in alive.values()), default=0)
    return {arm: turns[:common] for arm, turns in alive.items()}


def _line(measured: Measured) -> str:
    return (
        f"{measured.samples_per_s:.1f} samples/s, {measured.step_s:.2f} s/step, trainer idle "
        f"{measured.trainer_idle:.0%}, lag {measured.lag_mean:.2f} (max {measured.lag_max}), "
        f"{sum(measured.cpu_s.values()):.2f} CPU-s/step, first step after {measured.first_step_s:.0f} s, "
        f"other processes used {measured.foreign_cpu:.2f} cores"
    )
