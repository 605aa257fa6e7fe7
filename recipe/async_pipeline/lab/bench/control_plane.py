# SPDX-License-Identifier: Apache-2.0
"""`async-pipeline bench control-plane`: what a trajectory costs besides engine and trainer.

One job runs the whole pipeline with engines and training that cost nothing. The CPU time of its processes is
sampled from outside, from the first served version until the last step is finished, and divided by the
trajectories that were finished, whether they were trained or filtered.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from ...console import echo
from ...errors import ConfigError
from .arms import hydra_overrides
from .machine import machine
from .outputs import add_logs_option, check_outputs, job_logs
from .runner import JobFailed, command_of, run_watched
from .spans import MeasuredSpan, read_spans
from .usage import Usage, cpu_between, foreign_cpu
from .waits import LognormalWait

ENTRY = "recipe.async_pipeline.lab.bench.jobs.control_plane_job"
REWARD = "pkg://recipe.async_pipeline.lab.bench.spread_reward"
ENGINE = "ASYNC_PIPELINE_BENCH_ENGINE"
"""Environment variable: seed of the engines and distribution of their response times, as JSON."""
SERVED, TRAINED, CHECK, LOOP, END = "served", "trained", "check", "loop", "end"
"""Spans: weight updates, finished steps, control calls, lag of the event loop, state at the end."""

PARTS = {
    "IdleTaskRunner": "driver",
    "AgentLoopWorker": "workers",
    "SimpleStorageUnit": "store",
    "TransferQueueController": "store",
    "RewardLoopWorker": "rewards",
    "IdleServer": "servers",
    "raylet": "ray",
    "gcs_server": "ray",
    "ray/_private": "ray",
    "ray/dashboard": "ray",
}
"""Words in a command line to the part of the job."""
OURS = ("driver", "workers", "store", "rewards", "other")
"""Parts that add up to the total: all but the engines, and Ray's daemons, whose cost grows with time."""
SAMPLE_S = 0.25
LAG_LIMIT_S = 0.010
"""The lag of the driver's event loop that `--search` allows."""
SMALLEST = 16
"""Prompts of a step at which `--search` begins."""
SIGMA, CAP = 0.5, 4.0
"""Spread of the response times, and their limit in medians."""
MOST_WORKERS = 8
STEPS = 20
"""Optimizer steps unless `--steps` is given."""
ROWS_PER_PROMPT = 4
"""Rows of the data set for each prompt of a step."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `async-pipeline bench control-plane`."""
    parser.add_argument(
        "--groups", type=int, default=1024, metavar="N", help="prompts of a step (default: %(default)s)"
    )
    parser.add_argument(
        "--answers", type=int, default=16, metavar="N", help="responses to a prompt (default: %(default)s)"
    )
    parser.add_argument(
        "--replicas", type=int, default=8, metavar="N", help="rollout servers (default: %(default)s)"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=argparse.SUPPRESS,  # also an option of `bench`
        metavar="N",
        help=f"optimizer steps (default: {STEPS})",
    )
    parser.add_argument(
        "--lag", type=int, default=2, metavar="N", help="largest lag, in versions (default: %(default)s)"
    )
    parser.add_argument(
        "--filtered",
        type=float,
        default=0.3,
        metavar="SHARE",
        help="share of prompts whose responses get equal rewards and are filtered (default: %(default)s)",
    )
    parser.add_argument(
        "--answer-s",
        type=float,
        default=0.5,
        metavar="S",
        help="median time of a response in an engine, in seconds (default: %(default)s)",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=min(MOST_WORKERS, os.cpu_count() or 1),
        metavar="N",
        help="agent loop workers, and as many reward workers (default: one per core, at most "
        f"{MOST_WORKERS})",
    )
    parser.add_argument(
        "--search",
        action="store_true",
        help=f"also run smaller steps, from {SMALLEST} prompts on, and report the largest one that keeps "
        f"the lag of the driver's event loop below {LAG_LIMIT_S * 1e3:g} ms (99th percentile)",
    )
    parser.add_argument(
        "--json",
        type=Path,
        nargs="?",
        const=Path("-"),
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="write all results to FILE, or to standard output",
    )
    add_logs_option(parser)


class JobSize(msgspec.Struct, frozen=True, kw_only=True):
    """The size of a job."""

    groups: int
    answers: int
    replicas: int
    steps: int
    lag: int
    filtered: float
    answer_s: float
    workers: int

    def __post_init__(self) -> None:
        for name in ("groups", "answers", "replicas", "steps", "workers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} must be >= 1, got {getattr(self, name)}; use 1 or more")
        if self.lag < 0:
            raise ConfigError(f"--lag must be >= 0, got {self.lag}; use 0 for on-policy")
        if not 0 <= self.filtered < 1:
            raise ConfigError(f"--filtered must be in [0, 1), got {self.filtered:g}; use 0 for no filter")
        if self.filtered and self.answers < 2:
            raise ConfigError("--filtered needs --answers >= 2, got 1; use --filtered 0")
        if not self.answer_s > 0:
            raise ConfigError(f"--answer-s must be > 0, got {self.answer_s:g}; use e.g. 0.01")


def run(args: argparse.Namespace) -> int:
    """Run the job, and with `--search` smaller ones. Returns 0 if all completed, 1 if one failed."""
    options = {name: getattr(args, name) for name in JobSize.__struct_fields__}
    load = JobSize(**{**options, "steps": STEPS if args.steps is None else args.steps})
    to_stdout = args.json == Path("-")
    check_outputs(None if to_stdout else args.json, None, args.logs)
    say = partial(echo, file=sys.stderr)

    data: dict[str, Any] = {
        "machine": machine(),
        "command": "async-pipeline " + " ".join(sys.argv[1:]),
        "load": msgspec.to_builtins(load),
    }
    failed: dict[str, str] = {}
    with job_logs(args.logs, failed) as root:
        try:
            if args.search:
                data["search"] = _search(load, root, say)
            data |= run_job(load, root / "job", say)
            if args.search:
                data["largest_batch"] = largest_batch([*data["search"], data])
        except JobFailed as error:
            failed["job"] = str(error)
            say(f"failed: {error}")
            return 1

    if to_stdout:
        echo(json.dumps(data, indent=1))
    else:
        echo(table(data))
        if args.json:
            args.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return 0


def _search(load: JobSize, root: Path, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Double the prompts of a step until the lag exceeds its limit, below `--groups`, which runs anyway."""
    found: list[dict[str, Any]] = []
    groups = SMALLEST
    while groups < load.groups and (not found or found[-1]["loop_lag_s"]["p99"] < LAG_LIMIT_S):
        say(f"search: {groups} prompts")
        smaller = msgspec.structs.replace(load, groups=groups)
        found.append(run_job(smaller, root / f"search-{groups}", say))
        groups *= 2
    return found


def largest_batch(found: Sequence[Mapping[str, Any]]) -> int:
    """Return the trajectories of the largest step below the limit of the lag; 0 if there was none."""
    fine = (one["batch"] for one in found if one["loop_lag_s"]["p99"] < LAG_LIMIT_S)
    return max(fine, default=0)


def run_job(load: JobSize, directory: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Run one job. Returns its figures. Raises JobFailed if the job fails or hangs."""
    directory.mkdir(parents=True)
    make_task(directory / "task", load.groups)
    waits = LognormalWait(median=load.answer_s, sigma=SIGMA, cap=CAP * load.answer_s)
    usage = run_watched(
        directory,
        command_of(ENTRY, overrides_of(load, directory)),
        {
            "ASYNC_PIPELINE_TASK": str(directory / "task"),
            ENGINE: json.dumps({"seed": 1, "answer_s": msgspec.to_builtins(waits)}),
        },
        counting=(TRAINED, load.steps, "step"),
        say=say,
        parts=PARTS,
        every_s=SAMPLE_S,
    )
    summary = json.loads((directory / "run" / "summary.json").read_text(encoding="utf-8"))
    return figures(load, read_spans(directory), usage, summary)


def make_task(directory: Path, groups: int) -> None:
    """Write prompts, and a model without weights: only its tokenizer and its config are read."""
    from transformers import Qwen2Config

    from ..tasks.data import write_parquet
    from ..tasks.task import Problem
    from ..tasks.tokenizer import VOCAB_SIZE, make_tokenizer

    draw = random.Random(1)
    problems = [
        Problem(draw.randrange(10, 100), draw.randrange(10, 100)) for _ in range(ROWS_PER_PROMPT * groups)
    ]
    directory.mkdir()
    write_parquet(problems, "train", directory / "train.parquet")
    write_parquet(problems[:1], "val", directory / "val.parquet")

    model = directory / "model"
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        architectures=["Qwen2ForCausalLM"],
    )
    config.save_pretrained(model)
    make_tokenizer().save_pretrained(model)


def overrides_of(load: JobSize, directory: Path) -> list[str]:
    """Return the overrides of a job for verl's entry point."""
    rollout, actor = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
    values: dict[str, Any] = {
        "async_pipeline": True,
        "async_strategy": "n_step_ahead" if load.lag else "on_policy",
        "data.train_batch_size": load.groups,
        "data.max_prompt_length": 16,
        "data.max_response_length": 16,
        f"{actor}.ppo_mini_batch_size": load.groups,
        f"{actor}.ppo_micro_batch_size_per_gpu": 1,
        f"{rollout}.log_prob_micro_batch_size_per_gpu": 1,
        f"{rollout}.n": load.answers,
        f"{rollout}.n_gpus_per_node": load.replicas,
        f"{rollout}.max_num_seqs": 1024,
        f"{rollout}.agent.num_workers": load.workers,
        "reward.num_workers": load.workers,
        "reward.custom_reward_function.path": REWARD,
        "reward.custom_reward_function.reward_kwargs": {"filtered": load.filtered},
        "algorithm.filter_groups.enable": load.filtered > 0,
        "algorithm.filter_groups.metric": "reward",
        "trainer.total_training_steps": load.steps,
        # The data set has few batches; its prompts repeat.
        "trainer.total_epochs": math.ceil((load.steps + load.lag + 2) / (1 - load.filtered)),
        "trainer.default_local_dir": str(directory / "checkpoints"),
        "trainer.v1.async_pipeline.run_dir": str(directory / "run"),
        "ray_kwargs.ray_init.num_gpus": load.replicas + 1,
        # Do not join another Ray cluster on this machine.
        "ray_kwargs.ray_init.address": "local",
    }
    if load.lag:
        values["trainer.v1.async_pipeline.staleness.max_lag"] = load.lag
    return hydra_overrides(values)


def figures(
    load: JobSize, spans: Sequence[MeasuredSpan], usage: Sequence[Usage], summary: Mapping[str, Any]
) -> dict[str, Any]:
    """Reduce the output of a job."""
    by_name: dict[str, list[MeasuredSpan]] = {}
    for span in spans:
        by_name.setdefault(span.name, []).append(span)
    start, end = by_name[SERVED][0].end, by_name[TRAINED][-1].end
    groups = {
        name.removeprefix("groups_"): value for name, value in summary.items() if name.startswith("groups_")
    }
    finished = (groups["trained"] + groups["filtered"]) * load.answers

    spent = cpu_between(usage, start, end)
    cost = {part: spent.get(part, 0.0) / finished * 1e3 for part in dict.fromkeys((*OURS, "servers", "ray"))}
    checks = [span.seconds for span in by_name.get(CHECK, ()) if span.start >= start and span.end <= end]
    memory = [
        (int(span.facts["step"]), int(span.facts["private_bytes"]))
        for span in by_name[TRAINED]
        if "private_bytes" in span.facts
    ]
    last = by_name[END][-1].facts
    return {
        "batch": load.groups * load.answers,
        "cpu_ms_per_trajectory": {**cost, "total": sum(cost[part] for part in OURS)},
        "control_latency_s": {"p50": percentile(checks, 0.5), "p99": percentile(checks, 0.99)},
        "control_calls": len(checks),
        "loop_lag_s": by_name[LOOP][-1].facts,
        "memory_mib_per_100_steps": growth(memory),
        "driver_mib": memory[-1][1] / 2**20 if memory else None,
        "samples_per_s": finished / (end - start),
        "seconds": end - start,
        "groups": groups,
        "trajectories": {"finished": finished, "trained": summary["samples_trained"]},
        "left_in_store": last["left_in_store"],
        "most_open_requests": last["most_open_requests"],
        "foreign_cpu": foreign_cpu(usage),
    }


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the smallest value that this share of values does not exceed, or None without values."""
    ordered = sorted(values)
    return ordered[math.ceil(share * len(ordered)) - 1] if ordered else None


def growth(memory: Sequence[tuple[int, int]]) -> float | None:
    """Return the median slope of the second half of `(step, bytes)`, in MiB per 100 steps.

    None with fewer than two points in that half. The first half is the warm-up.
    """
    half = memory[len(memory) // 2 :]
    slopes = [
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for index, earlier in enumerate(half)
        for later in half[index + 1 :]
    ]
    return median(slopes) * 100 / 2**20 if slopes else None


def table(data: Mapping[str, Any]) -> str:
    """Return the figures as Markdown."""
    cost, lag, latency = data["cpu_ms_per_trajectory"], data["loop_lag_s"], data["control_latency_s"]
    names = [*OURS, "total", "servers", "ray"]
    lines = [
        "| CPU ms per trajectory | " + " | ".join(names) + " |",
        "| --- " * (len(names) + 1) + "|",
        f"| {data['batch']} a step | " + " | ".join(f"{cost[name]:.2f}" for name in names) + " |",
        "",
        f"{data['samples_per_s']:.0f} samples/s; control calls p50 {_ms(latency['p50'])}, p99 "
        f"{_ms(latency['p99'])}; loop lag p99 {_ms(lag['p99'])}, of which own {_ms(lag['own_p99'])}",
    ]
    slope = data["memory_mib_per_100_steps"]
    if slope is not None:
        lines.append(f"driver memory: {slope:+.1f} MiB per 100 steps")
    if "largest_batch" in data:
        lines.append(f"largest batch with less than {_ms(LAG_LIMIT_S)} of lag: {data['largest_batch']}")
    return "\n".join(lines)


def _ms(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds * 1e3:.1f} ms"
