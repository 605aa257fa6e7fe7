# SPDX-License-Identifier: Apache-2.0
"""What was measured -> the JSON that `--json` writes, and a table in Markdown."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from .arms import ARMS, DEVICES
from .bound import StageWork, bound_step_s
from .measure import Measured
from .statistics import Spread, paired_ratio, spread
from .workload import Workload

Results = Mapping[str, Sequence[Measured]]
"""The turns of each arm that succeeded in all of them."""
_SPREADS = (
    "samples_per_s",
    "step_s",
    "trainer_idle",
    "generator_idle",
    "stall_train_s",
    "stall_generate_s",
    "lag_mean",
    "peak_memory_gib",
    "first_step_s",
    "load_average",
)


def machine() -> dict[str, Any]:
    """What ran it."""
    return {
        "cores": psutil.cpu_count(),
        "cpu": _cpu_name(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "python": platform.python_version(),
        "kernel": platform.release(),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def bounds(results: Results, cores: int) -> dict[str, float]:
    """Seconds a step of the bound of each arm, from the smallest costs seen in any turn of a like arm.

    Waits are the same for all arms. What trains on one device and what trains on two is kept apart.
    """
    everywhere = [m.work for turns in results.values() for m in turns]
    found = {}
    for name in results:
        arm = ARMS[name]
        like = [
            m.work
            for other, turns in results.items()
            if ARMS[other].shared_devices == arm.shared_devices
            for m in turns
        ]
        work = StageWork(
            tail_s=min(work.tail_s for work in everywhere),
            group_s=min(work.group_s for work in everywhere),
            train_s=min(work.train_s for work in like),
            sync_s=min(work.sync_s for work in everywhere),
            generate_cpu_s=min(work.generate_cpu_s for work in like),
            cpu_s=min(work.cpu_s for work in like),
        )
        found[name] = bound_step_s(
            work,
            batches_in_flight=arm.batches_in_flight,
            bounded_lag=arm.bounded_lag,
            shared_devices=arm.shared_devices,
            cores=cores,
            devices=DEVICES,
        )
    return found


def report(
    name: str,
    workload: Workload,
    results: Results,
    *,
    seed: int,
    command: str,
    failed: Mapping[str, str],
    stock_poll: Mapping[str, Measured],
) -> dict[str, Any]:
    """Everything, as plain data."""
    around = machine()
    limits = bounds(results, int(around["cores"])) if results else {}
    arms = {arm: _arm(turns, limits[arm]) for arm, turns in results.items()}
    for arm, measured in stock_poll.items():
        if arm in arms:
            arms[arm]["stock_poll_samples_per_s"] = measured.samples_per_s
    rates = {arm: [m.samples_per_s for m in turns] for arm, turns in results.items()}
    return {
        "machine": around,
        "command": command,
        "seed": seed,
        "workload": {"name": name, "reason": workload.reason, "steps": workload.steps, "warmup": workload.warmup},
        "arms": arms,
        "failed": dict(failed),
        "ratios": {
            f"{a}/{b}": paired_ratio(rates[a], rates[b])._asdict() for a in rates for b in rates if a != b
        },
    }


def _arm(turns: Sequence[Measured], bound_s: float) -> dict[str, Any]:
    row: dict[str, Any] = {name: spread([getattr(m, name) for m in turns])._asdict() for name in _SPREADS}
    # A stall is one figure a step; its spread says little.
    for name in ("stall_train_s", "stall_generate_s"):
        row[name] = row[name]["median"]
    row["lag_max"] = max(m.lag_max for m in turns)
    row["cpu_s"] = {part: spread([m.cpu_s.get(part, 0.0) for m in turns]).median for part in sorted(turns[0].cpu_s)}
    row["bound_step_s"] = bound_s
    row["overlap_efficiency"] = spread([bound_s / m.step_s for m in turns])._asdict()
    row["turns"] = [{"samples_per_s": m.samples_per_s, "steps_s": m.steps_s} for m in turns]
    return row


_COLUMNS = (
    "arm", "samples/s", "s/step", "× {base}", "bound s/step", "of bound", "trainer idle", "generator idle",
    "stall train, ms", "stall generate, ms", "lag mean", "lag max", "CPU s/step", "memory GiB", "first step s",
    "samples/s, polls as shipped",
)  # fmt: skip


def table(data: Mapping[str, Any]) -> str:
    """A Markdown table: medians, with [smallest .. largest] where it matters."""
    arms: Mapping[str, Any] = data["arms"]
    base = "verl_sync" if "verl_sync" in arms else next(iter(arms), "")
    rows = [[column.format(base=base) for column in _COLUMNS], ["---"] * len(_COLUMNS)]
    for name, arm in arms.items():
        ratio = data["ratios"].get(f"{name}/{base}")
        stock = arm.get("stock_poll_samples_per_s")
        rows.append(
            [
                f"`{name}`",
                _range(arm["samples_per_s"], 1),
                _range(arm["step_s"], 2),
                _range(ratio, 2) if ratio else "1",
                f"{arm['bound_step_s']:.2f}",
                f"{arm['overlap_efficiency']['median']:.0%}",
                f"{arm['trainer_idle']['median']:.0%}",
                f"{arm['generator_idle']['median']:.0%}",
                f"{arm['stall_train_s'] * 1e3:.0f}",
                f"{arm['stall_generate_s'] * 1e3:.0f}",
                f"{arm['lag_mean']['median']:.2f}",
                str(arm["lag_max"]),
                f"{sum(arm['cpu_s'].values()):.2f}",
                f"{arm['peak_memory_gib']['median']:.1f}",
                f"{arm['first_step_s']['median']:.0f}",
                f"{stock:.1f}" if stock else "",
            ]
        )
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines += [f"\n`{arm}` failed: {why}" for arm, why in data["failed"].items()]
    return "\n".join(lines)


def _range(values: Mapping[str, float] | Spread, digits: int) -> str:
    v = values if isinstance(values, Mapping) else values._asdict()
    return f"{v['median']:.{digits}f} [{v['min']:.{digits}f} .. {v['max']:.{digits}f}]"
