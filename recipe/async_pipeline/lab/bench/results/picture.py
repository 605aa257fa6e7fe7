# SPDX-License-Identifier: Apache-2.0
"""Draw the results as one picture: throughput with its spread, and the use of the devices' time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ....errors import ConfigError

PIPELINE_COLOUR, VERL_COLOUR = "#2a78b5", "#8a8f98"
KINDS = {"work": "#4f8f6f", "paused for weights": "#d1495b", "idle": "#e4e6ea"}


def draw(data: Mapping[str, Any], path: Path) -> None:
    """Write the picture. Raises ConfigError if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError(
            "the picture needs matplotlib; `pip install matplotlib`, or omit --picture"
        ) from None

    matplotlib.use("agg")
    from matplotlib import pyplot

    arms: Mapping[str, Any] = data["arms"]
    names = list(arms)[::-1]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 1.4 + 0.62 * len(names)), layout="constrained")
    rates = [arms[name]["samples_per_s"] for name in names]
    middles = [rate["median"] for rate in rates]
    spreads = [[r["median"] - r["min"] for r in rates], [r["max"] - r["median"] for r in rates]]
    colours = [VERL_COLOUR if name.startswith("verl_") else PIPELINE_COLOUR for name in names]

    left.barh(names, middles, xerr=spreads, color=colours, ecolor="#333", capsize=3)
    for row, middle in enumerate(middles):
        left.text(max(middles) * 0.01, row, f"{middle:.1f}", va="center", color="white", fontweight="bold")
    left.set_xlabel("samples/s: median, smallest and largest turn")

    _draw_shares(right, arms, names)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)

    workload, turns = data["workload"], max((len(arm["turns"]) for arm in arms.values()), default=0)
    lines = [
        f"{workload['name']}: {data['machine']['cores']} cores, {data['machine']['cpu']}; "
        f"{turns} {'turn' if turns == 1 else 'turns'} of {workload['steps']} steps, seed {data['seed']}",
        *(f"{name} failed" for name in data["failed"]),
    ]
    figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=10)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw_shares(axes: Any, arms: Mapping[str, Any], names: list[str]) -> None:
    """Draw two bars per arm: the shares of work, pause and idle time of trainer and generator."""
    for row, name in enumerate(names):
        arm = arms[name]
        step = arm["step_s"]["median"]
        for offset, kind in ((0.19, "train"), (-0.19, "generate")):
            stall = min(1.0, arm[f"stall_{kind}_s"] / step)
            idle = arm["trainer_idle" if kind == "train" else "generator_idle"]["median"]
            if kind == "generate":
                # generator_idle includes the pauses; here they are separate.
                idle = max(0.0, idle - stall)

            at = 0.0
            for label, share in zip(KINDS, (max(0.0, 1 - idle - stall), stall, idle), strict=True):
                first = row == 0 and kind == "train"
                axes.barh(
                    row + offset, share, 0.34, left=at, color=KINDS[label], label=label if first else None
                )
                at += share
            axes.text(1.01, row + offset, kind, va="center", fontsize=8, color="#555")
    axes.set_yticks(range(len(names)), names)
    axes.set_xlim(0, 1.13)
    axes.set_xlabel("share of a step; the generator works while a request is open")
    axes.figure.legend(loc="outside lower right", ncols=3, frameon=False, fontsize=8)
