# SPDX-License-Identifier: Apache-2.0
"""Compute how long engines and trainer pause for a weight update, from their activity around it. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from ....core.events import Interval
from ...tables import spread
from .spans import MeasuredSpan

STEP, PUBLICATION, LIMITS = "engine_step", "publication", "limits"
"""Names of spans.

A step has the id of its process, a publication the costs of a weight update and the pause of the trainer.
Limits have the rates of a plain copy during generation.
"""


class Cost(NamedTuple):
    """The costs of one weight update, in seconds."""

    seconds: float
    """Time from its start until every replica serves the version."""
    trainer_stall: float
    generator_stall: float | None
    """Sum over all replicas; None if their engines made no steps and do not report it."""
    facts: Mapping[str, float]


def costs(spans: Sequence[MeasuredSpan], warmup: int, way: str | None = None) -> list[Cost]:
    """Return the costs of the weight updates after the first `warmup` ones; with `way`, of that way's.

    A replica stalls while a pause between two steps exceeds its usual pause: the median while no update runs.
    Replicas always have requests, so there is no other reason for a pause. Excess that also occurs without an
    update, in the same time, does not count. Without requests there are no steps, and what the replicas
    report counts.
    """
    steps: dict[int, list[Interval]] = defaultdict(list)
    for span in spans:
        if span.name == STEP:
            steps[int(span.facts["pid"])].append((span.start, span.end))

    publications = sorted((s for s in spans if s.name == PUBLICATION), key=lambda s: s.start)
    windows = [(s.start, s.end) for s in publications]
    pauses = {pid: pauses_of(sorted(made)) for pid, made in steps.items()}

    found = []
    of_way = [s for s in publications if way is None or s.facts["way"] == way]
    for span in of_way[warmup:]:
        window = span.start, span.end
        facts = {k: float(v) for k, v in span.facts.items() if k != "way"}
        stall = facts.get("stall_s")
        if steps:
            stall = sum(
                stall_in(each, window, usual_pause(each, windows), noise(each, windows))
                for each in pauses.values()
            )
        found.append(Cost(span.seconds, facts.pop("trainer_stall"), stall, facts))
    return found


def pauses_of(steps: Sequence[Interval]) -> list[Interval]:
    """Return the intervals from the end of each step to the start of the next."""
    return [(a[1], b[0]) for a, b in pairwise(steps) if b[0] > a[1]]


def noise(pauses: Sequence[Interval], windows: Sequence[Interval]) -> float:
    """Return the excess of pauses outside of all windows, in seconds per second."""
    if not pauses:
        return 0.0
    usual = usual_pause(pauses, windows)
    begin, end = pauses[0][0], pauses[-1][1]
    quiet = end - begin - sum(max(0.0, min(w[1], end) - max(w[0], begin)) for w in windows)
    longer = sum(max(0.0, b - a - usual) for a, b in pauses if not any(touch((a, b), w) for w in windows))
    return longer / quiet if quiet > 0 else 0.0


def usual_pause(pauses: Sequence[Interval], windows: Sequence[Interval]) -> float:
    """Return the median pause outside of all windows."""
    quiet = [end - start for start, end in pauses if not any(touch((start, end), w) for w in windows)]
    return median(quiet) if quiet else 0.0


def stall_in(pauses: Sequence[Interval], window: Interval, usual: float, noise: float) -> float:
    """Return the excess of the pauses that the window touches, in seconds, minus the expected noise."""
    longer = sum(max(0.0, end - start - usual) for start, end in pauses if touch((start, end), window))
    return max(0.0, longer - noise * (window[1] - window[0]))


def touch(a: Interval, b: Interval) -> bool:
    """Return whether two intervals overlap in more than a point."""
    return a[0] < b[1] and b[0] < a[1]


def summary(found: Sequence[Cost]) -> dict[str, Any]:
    """Return medians with their spread, the rate of each part, and the share of hidden work."""
    row: dict[str, Any] = {
        "trainer_stall_s": spread([cost.trainer_stall for cost in found])._asdict(),
        "publication_s": spread([cost.seconds for cost in found])._asdict(),
    }
    stalled = [cost.generator_stall for cost in found if cost.generator_stall is not None]
    if stalled:
        row["generator_stall_s"] = spread(stalled)._asdict()
    if all("shm_bytes" in cost.facts for cost in found):
        row["host_memory_bytes"] = max(cost.facts["shm_bytes"] for cost in found)

    parts = ("gather_s", "transfer_s", "load_s")
    if all(part in cost.facts for cost in found for part in parts):
        work = [sum(cost.facts[part] for part in parts) for cost in found]
        stalls = [cost.trainer_stall + (cost.generator_stall or 0.0) for cost in found]
        row["unhidden_s"] = _unhidden(found)
        row["hidden_fraction"] = spread([1 - s / w for s, w in zip(stalls, work, strict=True)])._asdict()
        row["commit_s"] = spread([cost.facts["commit_s"] for cost in found])._asdict()
        if "host_memory_bytes" in row:
            row["host_memory_versions"] = row["host_memory_bytes"] / found[-1].facts["bytes"]
        row["tokens_read_again"] = median(cost.facts["tokens_read_again"] for cost in found)

        for part in parts:
            copies = 1 if part == "gather_s" else "replicas"
            rates = [
                cost.facts["bytes"]
                * (cost.facts[copies] if isinstance(copies, str) else copies)
                / cost.facts[part]
                for cost in found
            ]
            row[f"{part.removesuffix('_s')}_gb_s"] = median(rates) / 1e9
            row[part] = spread([cost.facts[part] for cost in found])._asdict()
    return row


def _unhidden(found: Sequence[Cost]) -> dict[str, float]:
    """Return the median seconds of each part of the stalls.

    `call` is the way to the training workers and back. The replicas report `copy` (or the exchange) and
    `verification`; `around` is what their pauses last beyond that.
    """
    parts: dict[str, list[float]] = defaultdict(list)
    for cost in found:
        facts = cost.facts
        parts["gather"].append(facts["gather_s"])
        parts["call"].append(cost.trainer_stall - facts["gather_s"])
        parts["copy"].append(facts["stall_s"] - facts["prove_s"])
        parts["verification"].append(facts["prove_s"])
        parts["around"].append((cost.generator_stall or 0.0) - facts["stall_s"])
    return {name: median(values) for name, values in parts.items()}
