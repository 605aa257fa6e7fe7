# SPDX-License-Identifier: Apache-2.0
"""`async-pipeline bench checkpoint`: what a checkpoint of many tokens costs the trainer's process.

Two jobs of `control_plane` save checkpoints with engines, training and models that cost nothing: one with as
many prompts as fit into the memory, one with a quarter of them. Their difference is the cost of a token, from
which the figures of the requested size follow.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ...config.checks.machine import memory_bytes
from ...console import echo
from ..options import options_of
from ..tables import render_table
from . import control_plane
from .inputs.arms import hydra_overrides
from .inputs.waits import LognormalWait
from .measuring.machine import machine
from .measuring.spans import MeasuredSpan, read_spans
from .results.outputs import add_logs_option, check_outputs, job_logs
from .runner import JobFailed, command_of, run_watched

SAVED, READ = "saved", "read"
"""Spans: checkpoints that were written, and read again after the run."""
BYTES_A_TOKEN = 400
"""Host memory that all processes may take for each token, finished or in flight: an assumption."""
BASE_GIB = 3.0
"""Host memory that all processes may take without tokens: an assumption."""
SHARE = 0.8
"""Share of this machine's memory that the job may take by default."""
STEPS = 4
"""The last two checkpoints of a job lack groups in flight, or finished ones."""
ANSWER_S = 20.0
"""Time of a response in an engine, in which a checkpoint is written."""
TARGETS = {"stall_s": 0.2, "held_s": 2.0, "memory_mib": 64.0}
"""Largest time for which the event loop is blocked, time for which the train lane waits, and memory of the
trainer's process above the one before the checkpoint.
"""
NAMES = {"stall_s": "loop stall, s", "held_s": "train lane held, s", "memory_mib": "trainer memory, MiB"}


class CheckpointSize(msgspec.Struct, frozen=True, kw_only=True):
    """The size of a checkpoint. Each field is an option of the command, with its bounds and its help."""

    groups: Annotated[
        int, Meta(ge=1, title="N", description="prompts that are finished, and as many in flight")
    ] = 1024
    answers: Annotated[int, Meta(ge=1, title="N", description="responses to a prompt")] = 16
    tokens: Annotated[int, Meta(ge=1, title="N", description="tokens of a response")] = 8000
    memory_gib: Annotated[
        float, Meta(gt=0, title="GIB", description="host memory for all processes of the job")
    ] = round(SHARE * memory_bytes() / 2**30, 1)

    def __post_init__(self) -> None:
        for option in options_of(CheckpointSize):
            option.check(getattr(self, option.field))

    @property
    def measured_groups(self) -> int:
        """Return how many prompts fit into the memory."""
        tokens = max(0.0, self.memory_gib - BASE_GIB) * 2**30 / BYTES_A_TOKEN
        return max(1, min(self.groups, int(tokens / (2 * self.answers * self.tokens))))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `async-pipeline bench checkpoint`."""
    for option in options_of(CheckpointSize):
        option.add_to(parser, default=option.default)
    parser.add_argument(
        "--json", type=Path, default=argparse.SUPPRESS, metavar="FILE", help="write all results to FILE"
    )
    add_logs_option(parser)


def run(args: argparse.Namespace) -> int:
    """Measure. Returns 1 if a job fails, a checkpoint cannot be read or a target is missed."""
    size = CheckpointSize(**{name: getattr(args, name) for name in CheckpointSize.__struct_fields__})
    out: Path | None = getattr(args, "json", None)
    check_outputs(out, None, args.logs)
    say = partial(echo, file=sys.stderr)
    sizes = sorted({max(1, size.measured_groups // 4), size.measured_groups})
    failed: dict[str, str] = {}
    with job_logs(args.logs, failed) as root:
        try:
            measured = [run_job(size, groups, root / f"groups-{groups}", say) for groups in sizes]
        except JobFailed as error:
            failed["job"] = str(error)
            say(f"failed: {error}")
            return 1
    data = {
        "machine": machine(),
        "command": "async-pipeline " + " ".join(sys.argv[1:]),
        "size": msgspec.to_builtins(size),
        "measured": measured,
        "expected": expected(measured, 2 * size.groups * size.answers * size.tokens),
    }
    echo(table(data))
    if out is not None:
        out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    missed = any(data["expected"][name] > target for name, target in TARGETS.items())
    return int(missed or any(one["unreadable"] for one in measured))


def run_job(size: CheckpointSize, groups: int, directory: Path, say: Any) -> dict[str, Any]:
    """Run one job. Returns its figures. Raises JobFailed if the job fails or hangs."""
    say(f"checkpoints of {groups} finished prompts and {groups} in flight")
    directory.mkdir(parents=True)
    control_plane.make_task(directory / "task", groups)
    engine = {
        "seed": 1,
        "answer_s": msgspec.to_builtins(LognormalWait(median=ANSWER_S, sigma=0.0, cap=ANSWER_S)),
        "tokens": size.tokens,
    }
    run_watched(
        directory,
        command_of(control_plane.ENTRY, overrides_of(size, groups, directory)),
        {"ASYNC_PIPELINE_TASK": str(directory / "task"), control_plane.ENGINE: json.dumps(engine)},
        counting=(SAVED, STEPS, "checkpoint"),
        say=say,
    )
    return figures(groups, read_spans(directory))


def overrides_of(size: CheckpointSize, groups: int, directory: Path) -> list[str]:
    """Return the overrides of a job for verl's entry point."""
    load = control_plane.JobSize(
        groups=groups, answers=size.answers, replicas=2, steps=STEPS, lag=1, filtered=0.0
    )
    values = {
        "data.max_response_length": size.tokens,
        "actor_rollout_ref.rollout.max_model_len": control_plane.PROMPT_TOKENS + size.tokens,
        "trainer.save_freq": 1,
        "trainer.max_actor_ckpt_to_keep": None,
    }
    return [*control_plane.overrides_of(load, directory), *hydra_overrides(values)]


def figures(groups: int, spans: Sequence[MeasuredSpan]) -> dict[str, Any]:
    """Reduce the output of a job to its checkpoints with the most tokens, the worst value of each figure."""
    saved = {span.facts["step"]: span for span in spans if span.name == SAVED}
    read = [span.facts for span in spans if span.name == READ]
    contents = {facts["step"]: facts for facts in read if "error" not in facts}
    tokens = {step: facts["finished"] + facts["in_flight"] for step, facts in contents.items()}
    whole = [step for step in saved if tokens.get(step, 0) >= 0.9 * max(tokens.values(), default=1)]
    most = max(whole, key=lambda step: tokens[step], default=None)
    return {
        "groups": groups,
        "checkpoints": len(saved),
        "unreadable": [
            *(facts["error"] for facts in read if "error" in facts),
            *(
                f"step {step} is missing"
                for step in saved
                if len(contents) == len(read) and step not in contents
            ),
        ],
        "tokens": tokens.get(most, 0),
        "contents": contents.get(most),
        "stall_s": max((saved[step].facts["stall_s"] for step in whole), default=0.0),
        "own_stall_s": max((saved[step].facts["own_stall_s"] for step in whole), default=0.0),
        "held_s": max((saved[step].facts["held_s"] for step in whole), default=0.0),
        "whole_s": max((saved[step].seconds for step in whole), default=0.0),
        "memory_mib": max((saved[step].facts["more_bytes"] / 2**20 for step in whole), default=0.0),
    }


def expected(measured: Sequence[Mapping[str, Any]], tokens: int) -> dict[str, Any]:
    """Return the figures of a checkpoint of `tokens`, from the cost of a token in the measured ones."""
    first, last = measured[0], measured[-1]
    more = last["tokens"] - first["tokens"]
    found: dict[str, Any] = {"tokens": tokens, "per_million_tokens": {}}
    for name in TARGETS:
        # With one size, all of it counts as the cost of its tokens.
        of_more = (last[name] - first[name]) / more if more > 0 else last[name] / max(1, last["tokens"])
        slope = max(0.0, of_more)
        found["per_million_tokens"][name] = slope * 1e6
        found[name] = last[name] + slope * max(0, tokens - last["tokens"])
    return found


def table(data: Mapping[str, Any]) -> str:
    """Return the figures as Markdown."""
    expects = data["expected"]
    rows = [
        [
            f"measured, {one['tokens'] / 1e6:.1f} million tokens",
            *(f"{one[name]:.3f}" for name in TARGETS),
            f"{one['checkpoints'] - len(one['unreadable'])} of {one['checkpoints']}",
        ]
        for one in data["measured"]
    ]
    rows += [
        ["each further million", *(f"{expects['per_million_tokens'][name]:.4f}" for name in TARGETS), ""],
        [
            f"extrapolated, {expects['tokens'] / 1e6:.1f} million",
            *(f"{expects[name]:.3f}" for name in TARGETS),
            "",
        ],
        ["target", *(f"{target:g}" for target in TARGETS.values()), "all"],
    ]
    unreadable = [text for one in data["measured"] for text in one["unreadable"]]
    header = ["tokens, half of them in flight", *NAMES.values(), "readable"]
    return "\n".join([render_table(header, rows), *unreadable])
