# SPDX-License-Identifier: Apache-2.0
"""Reduce the spans and samples of one job to the figures of one arm in one turn. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from statistics import fmean
from typing import NamedTuple

import msgspec

from ....core.events import overlap_seconds
from ..inputs.workload import Workload
from .spans import MeasuredSpan, union
from .usage import Usage, cpu_between, foreign_cpu

TRAIN = ("old_log_prob", "ref_log_prob", "advantage", "update_actor")
"""Work of the training devices; `update_actor` ends a step."""
SYNC = "sync"
"""The training loop waits for weights: verl for its whole update, this package for the gather."""
WEIGHTS = "weights"
"""Time from the gather of a version until all replicas serve it."""
PAUSED = "paused"
"""The engines pause although requests may be open.

With verl, for its update, and on shared devices also for training; with this package, for the load.
"""


class StageWork(NamedTuple):
    """Seconds of work and latency of one step, from the least disturbed measurements."""

    tail_s: float
    """Time from the first prompt of a batch to its last reward."""
    group_s: float
    """Mean time from the first request of a prompt to its last reward."""
    train_s: float
    """Log-probs, advantages and optimizer step on the training devices."""
    update_s: float
    """The optimizer step alone; all other training work can precede the last response."""
    weights_s: float
    """Weight update from the trainer to the engines."""
    generate_cpu_s: float
    """CPU time of the engines; on a CPU, a device is a thread."""
    cpu_s: float
    """CPU time of all processes, including their overhead."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One arm in one turn; seconds and counts are per step unless documented otherwise."""

    samples_per_s: float
    step_s: float
    steps_s: list[float]
    """Seconds of every measured step; `step_s` is their mean."""
    trainer_idle: float
    """Share of the time in which the training devices neither train nor wait for weights."""
    generator_idle: float
    """Share of the time in which no request is open or the engines pause."""
    stall_train_s: float
    stall_generate_s: float
    lag_mean: float
    lag_max: int
    cpu_s: dict[str, float]
    peak_memory_gib: float
    """Largest sum of the private memory of all processes."""
    first_step_s: float
    """Time from the start of the command to the end of the first optimizer step."""
    load_before: float
    """Load average of the machine at the start of the job; it includes the previous job for some minutes."""
    foreign_cpu: float
    """Mean number of cores that other processes kept busy."""
    work: StageWork


class NotEnoughSteps(ValueError):
    """The job ended before its measured steps."""


def measure(
    spans: Sequence[MeasuredSpan],
    usage: Sequence[Usage],
    workload: Workload,
    *,
    started: float,
    load_before: float,
) -> Measured:
    """Reduce the output of one job's probes; `started` is the start of its command on the spans' clock.

    Raises NotEnoughSteps if the job ended before its measured steps.
    """
    updates = [span for span in spans if span.name == "update_actor"]
    last = workload.warmup + workload.steps
    if len(updates) < last:
        raise NotEnoughSteps(f"{len(updates)} of {last} optimizer steps ended")

    ends = [span.end for span in updates[workload.warmup - 1 : last]]
    window = (ends[0], ends[-1])
    seconds, steps = window[1] - window[0], workload.steps
    measured = updates[workload.warmup : last]
    samples = sum(int(span.facts["samples"]) for span in measured)
    lags = [lag for span in measured for lag in span.facts["lags"]]

    train = clip(spans, TRAIN, window)
    sync = clip(spans, (SYNC,), window)
    requests = union(clip(spans, ("generate",), window))
    paused = union(clip(spans, (PAUSED,), window))

    cpu = {part: spent / steps for part, spent in cpu_between(usage, *window).items()}
    stalled = overlap_seconds(requests, paused)

    updates_s = covered(clip(spans, ("update_actor",), window)) / steps
    durations = [
        span.seconds for span in spans if span.name == WEIGHTS and window[0] <= span.end <= window[1]
    ]

    tail_s, group_s = latencies(spans, window, workload.prompts_per_step)

    return Measured(
        samples_per_s=samples / seconds,
        step_s=seconds / steps,
        steps_s=[b - a for a, b in zip(ends, ends[1:], strict=False)],
        trainer_idle=1 - covered([*train, *sync]) / seconds,
        generator_idle=1 - (covered(requests) - stalled) / seconds,
        stall_train_s=covered(sync) / steps,
        stall_generate_s=stalled / steps,
        lag_mean=sum(lags) / len(lags),
        lag_max=max(lags),
        cpu_s=cpu,
        peak_memory_gib=max(sample.private_bytes for sample in usage) / 2**30,
        first_step_s=updates[0].end - started,
        load_before=load_before,
        foreign_cpu=foreign_cpu(usage),
        work=StageWork(
            tail_s=tail_s,
            group_s=group_s,
            train_s=covered(train) / steps,
            update_s=updates_s,
            weights_s=fmean(durations) if durations else 0.0,
            generate_cpu_s=cpu.get("generate", 0.0),
            cpu_s=sum(cpu.values()),
        ),
    )


def clip(
    spans: Sequence[MeasuredSpan], names: Sequence[str], window: tuple[float, float]
) -> list[tuple[float, float]]:
    """Return the parts of the named spans within the window."""
    low, high = window
    inside = [(max(s.start, low), min(s.end, high)) for s in spans if s.name in names]
    return [(start, end) for start, end in inside if end > start]


def covered(intervals: Sequence[tuple[float, float]]) -> float:
    """Return the seconds covered by at least one interval."""
    return sum(end - start for start, end in union(intervals))


def latencies(
    spans: Sequence[MeasuredSpan], window: tuple[float, float], prompts: int
) -> tuple[float, float]:
    """Return the mean seconds from first request to last reward: of each batch's slowest prompt, and of all.

    A batch is `prompts` prompts in order of their start, as an on-policy trainer takes them. Only batches
    that ended in the window count.
    """
    begun: dict[int, float] = {}
    ended: dict[int, float] = {}
    for span in spans:
        if span.name in ("episode", "judge"):
            prompt = int(span.facts["prompt"])
            ended[prompt] = max(ended.get(prompt, 0.0), span.end)
            if span.name == "episode":
                begun[prompt] = min(begun.get(prompt, span.start), span.start)

    order = sorted(begun, key=lambda prompt: begun[prompt])
    batches = [order[at : at + prompts] for at in range(0, len(order) - prompts + 1, prompts)]
    whole = [
        [ended[prompt] - begun[prompt] for prompt in batch]
        for batch in batches
        if window[0] <= max(ended[prompt] for prompt in batch) <= window[1]
    ]
    if not whole:
        return 0.0, 0.0
    return fmean(map(max, whole)), fmean(chain(*whole))
