# SPDX-License-Identifier: Apache-2.0
"""`async-pipeline bench`: arms side by side, in turns, with a table, a JSON file and a picture."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from ..cli import echo
from ..errors import ConfigError
from ..toy.build import ToySpec, ensure_toy
from . import weight_sync
from .arms import ARMS, parse_arms
from .measure import Measured
from .picture import draw
from .report import report, table
from .runner import JobFailed, jobs_in_turns, run_job
from .workload import Workload, load, names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `async-pipeline bench`."""
    parser.add_argument("--workload", default="agentic_wait", metavar="NAME", help=f"one of {', '.join(names())}, or a file (default: %(default)s)")
    parser.add_argument("--arms", default=",".join(ARMS), metavar="A,B,...", help="in the order of their turns (default: %(default)s)")
    parser.add_argument("--steps", type=int, metavar="N", help="optimizer steps to measure, beside warm-up (default: the workload's)")
    parser.add_argument("--repeats", type=int, default=3, metavar="R", help="turns of each arm (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="decides prompts and waits (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there, after each job")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="write a PNG there (default: beside --json)")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep what the jobs print and write (default: a temporary folder)")
    parser.add_argument("--no-stock-poll", action="store_true", help="do not also run verl's arms once with their polling interval as shipped")
    text = "instead: what a publication of weights costs, with our way and with verl's"
    weight_sync.add_arguments(
        parser.add_subparsers(dest="instead", metavar="weight-sync").add_parser("weight-sync", help=text, description=text)
    )


def run(args: argparse.Namespace) -> int:
    """Run all jobs. Status 0: all arms completed; 1: some failed."""
    if args.instead is not None:
        return weight_sync.run(args)
    arms = parse_arms(args.arms)
    workload = load(args.workload)
    if args.steps is not None:
        workload = msgspec.structs.replace(workload, steps=args.steps)
    if args.repeats < 1 or workload.steps < 1:
        raise ConfigError(f"--repeats and --steps must be >= 1, got {args.repeats} and {workload.steps}")
    task = ensure_toy(ToySpec.of(seed=0, tied=True), Path(".cache/toy").resolve(), report=partial(echo, file=sys.stderr))
    root = Path(tempfile.mkdtemp(prefix="async-pipeline-bench-")) if args.logs is None else args.logs.resolve()
    jobs = jobs_in_turns(arms, args.repeats, root, stock_poll=not args.no_stock_poll)
    command = "async-pipeline " + " ".join(sys.argv[1:])
    done: dict[str, list[Measured]] = {arm: [] for arm in arms}
    stock: dict[str, Measured] = {}
    failed: dict[str, str] = {}
    data: dict[str, Any] = {}
    started = time.monotonic()
    echo(f"{args.workload}: {workload.reason}\n{len(jobs)} jobs of {workload.total_steps} steps; logs in {root}")
    for number, job in enumerate(jobs, start=1):
        if job.arm in failed:
            continue
        poll = "" if job.turn else ", polls as shipped"
        echo(f"[{number}/{len(jobs)}] {job.arm}{f', turn {job.turn}' if job.turn else poll} ({time.monotonic() - started:.0f} s so far)")
        try:
            measured = run_job(job, workload, args.seed, task.dir, echo)
        except JobFailed as error:
            failed[job.arm] = str(error)
            echo(f"  failed: {error}")
        else:
            echo(f"  {_line(measured)}")
            if job.turn:
                done[job.arm].append(measured)
            else:
                stock[job.arm] = measured
        complete = _complete(done, failed)
        data = report(
            args.workload, workload, complete, seed=args.seed, command=command, failed=failed, stock_poll=stock
        )
        if args.json:
            args.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    echo("\n" + table(data))
    _draw(args, workload, data)
    return 1 if failed else 0


def _complete(done: Mapping[str, list[Measured]], failed: Mapping[str, str]) -> dict[str, list[Measured]]:
    """The arms that can be compared: each cut to the turns that all of them have done."""
    alive = {arm: turns for arm, turns in done.items() if turns and arm not in failed}
    common = min((len(turns) for turns in alive.values()), default=0)
    return {arm: turns[:common] for arm, turns in alive.items()}


def _line(measured: Measured) -> str:
    return (
        f"{measured.samples_per_s:.1f} samples/s, {measured.step_s:.2f} s/step, trainer idle {measured.trainer_idle:.0%}, "
        f"lag {measured.lag_mean:.2f} (max {measured.lag_max}), {sum(measured.cpu_s.values()):.2f} CPU-s/step, "
        f"first step after {measured.first_step_s:.0f} s, load {measured.load_average:.1f}"
    )


def _draw(args: argparse.Namespace, workload: Workload, data: Mapping[str, Any]) -> None:
    del workload
    path = args.picture or (args.json.with_suffix(".png") if args.json else None)
    if path is not None and data["arms"]:
        draw(data, path)
        echo(f"\npicture: {path}")
