# SPDX-License-Identifier: Apache-2.0
"""One job's spans and samples -> the figures of one arm in one turn. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from statistics import fmean, median

import msgspec

from ..core.events import overlap_seconds
from .bound import StageWork
from .spans import Span, union
from .usage import Usage, cpu_between
from .workload import Workload

TRAIN = ("old_log_prob", "ref_log_prob", "advantage", "update_actor")
"""Work of the training devices. `update_actor` ends a step."""
SYNC = "sync"
"""The training loop stands still for the weights: the whole of verl's update, the gather of ours."""
LOAD = "load"
"""A replica stands still for the weights; only written where requests go on meanwhile."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One arm in one turn. Seconds and counts are a step's, unless their name says otherwise."""

    samples_per_s: float
    step_s: float
    steps_s: list[float]
    """Every measured step; `step_s` is their mean, which is what throughput follows."""
    trainer_idle: float
    """Share of the time in which the training devices neither train nor wait for weights."""
    generator_idle: float
    """Share of the time in which no request is open."""
    stall_train_s: float
    stall_generate_s: float
    lag_mean: float
    lag_max: int
    cpu_s: dict[str, float]
    peak_memory_gib: float
    """Largest sum of memory that processes do not share."""
    first_step_s: float
    """From the start of the command to the end of the first optimizer step."""
    load_average: float
    work: StageWork


class NotEnoughSteps(ValueError):
    """The job ended before its measured steps were done."""


def measure(
    spans: Sequence[Span], usage: Sequence[Usage], workload: Workload, *, started: float, load_average: float
) -> Measured:
    """Reduce what the probes of one job wrote. `started` is when its command began, on the spans' clock.

    Raises NotEnoughSteps: the job did not get far enough.
    """
    updates = [span for span in spans if span.name == "update_actor"]
    last = workload.warmup + workload.steps
    if len(updates) < last or workload.warmup < 1:
        raise NotEnoughSteps(f"{len(updates)} optimizer steps ended, {last} are needed, of which at least one before")
    ends = [span.end for span in updates[workload.warmup - 1 : last]]
    window = (ends[0], ends[-1])
    seconds, steps = window[1] - window[0], workload.steps
    measured = updates[workload.warmup : last]
    samples = sum(int(span.facts["samples"]) for span in measured)
    lags = [lag for span in measured for lag in span.facts["lags"]]

    train = clip(spans, TRAIN, window)
    sync = clip(spans, (SYNC,), window)
    requests = clip(spans, ("generate",), window)
    loads = clip(spans, (LOAD,), window)
    cpu = {part: spent / steps for part, spent in cpu_between(usage, *window).items()}
    # verl aborts all requests for the length of its sync; ours only hold for the load.
    stalled = overlap_seconds(union(requests), union(loads or sync))
    train_s, sync_s = covered(train) / steps, covered(sync) / steps
    tail_s, group_s = latencies(spans, window)
    return Measured(
        samples_per_s=samples / seconds,
        step_s=seconds / steps,
        steps_s=[b - a for a, b in zip(ends, ends[1:], strict=False)],
        trainer_idle=1 - covered([*train, *sync]) / seconds,
        generator_idle=1 - covered(requests) / seconds,
        stall_train_s=sync_s,
        stall_generate_s=stalled / steps,
        lag_mean=sum(lags) / len(lags),
        lag_max=max(lags),
        cpu_s=cpu,
        peak_memory_gib=max(sample.private_bytes for sample in usage) / 2**30,
        first_step_s=updates[0].end - started,
        load_average=load_average,
        work=StageWork(
            tail_s=tail_s,
            group_s=group_s,
            train_s=train_s,
            sync_s=sync_s,
            generate_cpu_s=cpu.get("generate", 0.0),
            cpu_s=sum(cpu.values()),
        ),
    )


def clip(spans: Sequence[Span], names: Sequence[str], window: tuple[float, float]) -> list[tuple[float, float]]:
    """The parts of the named spans that lie in the window."""
    low, high = window
    inside = [(max(s.start, low), min(s.end, high)) for s in spans if s.name in names]
    return [(start, end) for start, end in inside if end > start]


def covered(intervals: Sequence[tuple[float, float]]) -> float:
    """Seconds that any of them covers."""
    return sum(end - start for start, end in union(intervals))


def latencies(spans: Sequence[Span], window: tuple[float, float]) -> tuple[float, float]:
    """Seconds from a prompt's first request to its last reward: of a batch's slowest (median), and on average.

    Counts the prompts that got their last reward in the window.
    """
    begun: dict[int, float] = {}
    ended: dict[int, float] = {}
    batch_of: dict[int, int] = {}
    for span in spans:
        if span.name in ("episode", "judge"):
            prompt = int(span.facts["prompt"])
            ended[prompt] = max(ended.get(prompt, 0.0), span.end)
            if span.name == "episode":
                begun[prompt] = min(begun.get(prompt, span.start), span.start)
                batch_of[prompt] = int(span.facts["step"])
    of_batch: dict[int, list[float]] = defaultdict(list)
    for prompt, batch in batch_of.items():
        if window[0] <= ended[prompt] <= window[1]:
            of_batch[batch].append(ended[prompt] - begun[prompt])
    if not of_batch:
        return 0.0, 0.0
    return median(map(max, of_batch.values())), fmean(chain(*of_batch.values()))
