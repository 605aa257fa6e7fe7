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
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ...console import echo
from ...errors import ConfigError
from ..options import options_of
from ..tables import percentile, render_table
from .inputs.arms import hydra_overrides
from .inputs.waits import LognormalWait
from .measuring.machine import machine
from .measuring.spans import MeasuredSpan, read_spans
from .measuring.usage import Usage, cpu_between, foreign_cpu
from .results.outputs import add_logs_option, check_outputs, job_logs
from .runner import JobFailed, command_of, run_watched

PROMPT_TOKENS = 16
"""Longest prompt of an idle job."""
ENTRY = "recipe.async_pipeline.lab.bench.jobs.control_plane_job"
REWARD = "pkg://recipe.async_pipeline.lab.bench.inputs.spread_reward"
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
ROWS_PER_PROMPT = 4
"""Rows of the data set for each prompt of a step."""


class JobSize(msgspec.Struct, frozen=True, kw_only=True):
    """The size of a job. Each field is an option of the command, with its bounds and its help."""

    groups: Annotated[int, Meta(ge=1, title="N", description="prompts of a step")] = 1024
    answers: Annotated[int, Meta(ge=1, title="N", description="responses to a prompt")] = 16
    replicas: Annotated[int, Meta(ge=1, title="N", description="rollout servers")] = 8
    steps: Annotated[int, Meta(ge=1, title="N", description="optimizer steps")] = 20
    lag: Annotated[int, Meta(ge=0, title="N", description="largest lag, in versions")] = 2
    filtered: Annotated[
        float,
        Meta(
            ge=0,
            lt=1,
            title="SHARE",
            description="share of prompts whose responses get equal rewards and are filtered",
        ),
    ] = 0.3
    answer_s: Annotated[
        float, Meta(gt=0, title="S", description="median time of a response in an engine, in seconds")
    ] = 0.5
    workers: Annotated[
        int,
        Meta(
            ge=1,
            title="N",
            description="agent loop workers, and as many reward workers; by default one per core, at most 8",
        ),
    ] = min(MOST_WORKERS, os.cpu_count() or 1)

    def __post_init__(self) -> None:
        for option in options_of(JobSize):
            option.check(getattr(self, option.field))
        if self.filtered and self.answers < 2:
            raise ConfigError("--filtered needs --answers >= 2, got 1; use --filtered 0")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `async-pipeline bench control-plane`."""
    for option in options_of(JobSize):
        # `bench` has some of the options, too, and its default would replace the value.
        option.add_to(parser, default=argparse.SUPPRESS if option.field == "steps" else option.default)
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


def run(args: argparse.Namespace) -> int:
    """Run the job, and with `--search` smaller ones. Returns 0 if all completed, 1 if one failed."""
    # Without the option, `bench` leaves its steps at None.
    given = {name: getattr(args, name) for name in JobSize.__struct_fields__}
    load = JobSize(**{name: value for name, value in given.items() if value is not None})
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
        "data.max_prompt_length": PROMPT_TOKENS,
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
        # There are no workers, whose update could keep them.
        "trainer.v1.async_pipeline.training.old_logp": "trainer",
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
    checks = Counter(
        span.seconds for span in by_name.get(CHECK, ()) if span.start >= start and span.end <= end
    )
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
        "control_calls": checks.total(),
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
    row = [f"{data['batch']} a step", *(f"{cost[name]:.2f}" for name in names)]
    lines = [
        render_table(["CPU ms per trajectory", *names], [row]),
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
