# SPDX-License-Identifier: Apache-2.0
"""Build the JSON of `--json` and the Markdown table from the measured figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ....core.lag.bound import LoopCosts, bound_terms
from ...tables import paired_ratio, render_spread, render_table, spread
from ..inputs.arms import ARMS, DEVICES
from ..inputs.workload import Workload
from ..measuring.machine import machine
from ..measuring.measure import Measured, StageWork
from ..runner import FAST_POLL_S, STOCK_POLL_S

Results = Mapping[str, Sequence[Measured]]
"""The turns of each arm whose turns all succeeded."""
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
    "load_before",
    "foreign_cpu",
)


def bounds(results: Results, cores: int) -> dict[str, dict[str, float]]:
    """Return the terms of the bound of each arm, from the smallest costs measured in any turn.

    Latencies and weights are the same for all arms, so their minimum is over all arms. The work of devices
    and processes depends on whether devices are shared, so its minimum is over arms of the same kind.
    """
    everywhere = [m.work for turns in results.values() for m in turns]
    found = {}
    for name in results:
        arm = ARMS[name]
        same_kind = [
            m.work
            for other, turns in results.items()
            if ARMS[other].shared_devices == arm.shared_devices
            for m in turns
        ]

        work = StageWork(
            tail_s=min(work.tail_s for work in everywhere),
            group_s=min(work.group_s for work in everywhere),
            train_s=min(work.train_s for work in same_kind),
            update_s=min(work.update_s for work in same_kind),
            weights_s=min(work.weights_s for work in everywhere),
            generate_cpu_s=min(work.generate_cpu_s for work in same_kind),
            cpu_s=min(work.cpu_s for work in same_kind),
        )

        costs = LoopCosts(
            tail_s=work.tail_s, group_s=work.group_s, update_s=work.update_s, weights_s=work.weights_s
        )
        ahead = arm.batches_in_flight - 1
        found[name] = bound_terms(
            pools_of(work, arm.shared_devices, cores),
            costs,
            max_lag=ahead if arm.bounded_lag else None,
            batches_ahead=ahead,
        )
    return found


def pools_of(work: StageWork, shared_devices: bool, cores: int) -> dict[str, float]:
    """Return the seconds per step of the devices and of the cores.

    One device trains while one generates; shared devices do both in turn. All processes share the cores.
    """
    devices_s = (
        work.train_s + work.generate_cpu_s / DEVICES
        if shared_devices
        else max(work.train_s, work.generate_cpu_s)
    )
    return {"devices": devices_s, "cores": work.cpu_s / cores}


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
    """Return all results as plain data, as `--json` writes them."""
    hardware = machine()
    limits = bounds(results, int(hardware["cores"])) if results else {}
    arms = {arm: _arm(turns, limits[arm]) for arm, turns in results.items()}
    for arm, measured in stock_poll.items():
        if arm in arms:
            arms[arm]["stock_poll_samples_per_s"] = measured.samples_per_s

    rates = {arm: [m.samples_per_s for m in turns] for arm, turns in results.items()}
    return {
        "machine": hardware,
        "command": command,
        "seed": seed,
        "polls_s": {"compared": FAST_POLL_S, "shipped": STOCK_POLL_S},
        "workload": {"name": name, **msgspec.to_builtins(workload)},
        "arms": arms,
        "failed": dict(failed),
        "ratios": {
            f"{a}/{b}": paired_ratio(rates[a], rates[b])._asdict() for a in rates for b in rates if a != b
        },
    }


def _arm(turns: Sequence[Measured], terms: Mapping[str, float]) -> dict[str, Any]:
    row: dict[str, Any] = {name: spread([getattr(m, name) for m in turns])._asdict() for name in _SPREADS}
    # A stall is one figure per step, so its spread is not meaningful.
    for name in ("stall_train_s", "stall_generate_s"):
        row[name] = row[name]["median"]
    row["lag_max"] = max(m.lag_max for m in turns)
    row["cpu_s"] = {
        part: spread([m.cpu_s.get(part, 0.0) for m in turns]).median for part in sorted(turns[0].cpu_s)
    }
    row["bound_terms_s"] = dict(terms)
    row["bound_step_s"] = max(terms.values())
    row["overlap_efficiency"] = spread([row["bound_step_s"] / m.step_s for m in turns])._asdict()
    row["turns"] = [{**msgspec.to_builtins(m), "work": m.work._asdict()} for m in turns]
    return row


def table(data: Mapping[str, Any]) -> str:
    """Return Markdown tables of speed, use of time and cost, and the failures; medians with [min .. max]."""
    arms: Mapping[str, Any] = data["arms"]
    base = "verl_sync" if "verl_sync" in arms else next(iter(arms), "")

    speed, time_, cost = [], [], []
    for name, arm in arms.items():
        ratio = data["ratios"].get(f"{name}/{base}")
        stock = arm.get("stock_poll_samples_per_s")
        binding = max(arm["bound_terms_s"], key=lambda term: arm["bound_terms_s"][term])

        speed.append(
            [
                f"`{name}`",
                render_spread(arm["samples_per_s"], ".1f"),
                render_spread(ratio, ".2f") if ratio else "1",
                render_spread(arm["step_s"], ".2f"),
                render_spread(arm["lag_mean"], ".2f"),
                str(arm["lag_max"]),
                f"{stock:.1f}" if stock else "",
            ]
        )

        time_.append(
            [
                f"`{name}`",
                f"{arm['trainer_idle']['median']:.0%}",
                f"{arm['generator_idle']['median']:.0%}",
                f"{arm['stall_train_s'] * 1e3:.0f}",
                f"{arm['stall_generate_s'] * 1e3:.0f}",
                f"{arm['bound_step_s']:.2f} ({binding})",
                f"{arm['overlap_efficiency']['median']:.0%}",
            ]
        )

        cost.append(
            [
                f"`{name}`",
                *(f"{arm['cpu_s'].get(part, 0.0):.2f}" for part in ("train", "generate", "other")),
                f"{arm['peak_memory_gib']['median']:.1f}",
                render_spread(arm["first_step_s"], ".0f"),
                render_spread(arm["foreign_cpu"], ".2f"),
            ]
        )

    blocks = [
        render_table(
            [
                "arm",
                "samples/s",
                f"× {base}",
                "s/step",
                "lag, mean",
                "lag, max",
                "samples/s, polling as shipped (one job)",
            ],
            speed,
        ),
        f"verl's arms poll for finished responses every {data['polls_s']['compared']:g} s; "
        f"as shipped, every {data['polls_s']['shipped']:g} s.",
        render_table(
            [
                "arm",
                "trainer idle",
                "generator idle",
                "stall train, ms",
                "stall generate, ms",
                "bound, s/step",
                "of bound",
            ],
            time_,
        ),
        render_table(
            [
                "arm",
                "CPU s/step: train",
                "generate",
                "other",
                "memory GiB",
                "first step, s",
                "foreign CPU, cores",
            ],
            cost,
        ),
        *_against_verl(data),
        *(f"`{arm}` failed: {why}" for arm, why in data["failed"].items()),
    ]
    return "\n\n".join(blocks)


def _against_verl(data: Mapping[str, Any]) -> list[str]:
    """Return a table of the paired ratios of each strategy of this package to each trainer of verl."""
    pipeline = [name for name in data["arms"] if ARMS[name].uses_pipeline]
    verl = [name for name in data["arms"] if not ARMS[name].uses_pipeline]
    if not pipeline or not verl:
        return []
    rows = [[f"`{a}`", *(render_spread(data["ratios"][f"{a}/{b}"], ".2f") for b in verl)] for a in pipeline]
    return [render_table(["samples/s, paired", *(f"/ `{b}`" for b in verl)], rows)]
