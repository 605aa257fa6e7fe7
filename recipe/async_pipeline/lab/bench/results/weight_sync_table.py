# SPDX-License-Identifier: Apache-2.0
"""What the figures of `async-pipeline bench weight-sync` mean together: ratios, shares of limits, a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...tables import render_spread, render_table

STOCK = "verl_stock"
COLUMNS = ("trainer_stall_s", "generator_stall_s", "publication_s", "gather_s", "transfer_s", "load_s")
RATES = ("gather", "transfer")
"""Parts whose rate is compared with a plain copy on the idle machine."""


def complete(data: dict[str, Any]) -> None:
    """Add what follows from the figures so far: ratios to verl's manager, and to the fewest replicas."""
    rows, limit = data["replicas"], data["limits"]["memcpy_gb_s"]
    first = next(iter(rows.values()))
    for row in rows.values():
        if found := ratios(row):
            row["ratios"] = found
        for way in _ways(row):
            of = row[way]
            of["share_of_memcpy"] = {
                part: of[f"{part}_gb_s"] / limit for part in RATES if f"{part}_gb_s" in of
            }
            if way in first:
                of["publication_growth"] = (
                    of["publication_s"]["median"] / first[way]["publication_s"]["median"]
                )


def ratios(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the ratios of the median stalls of this package's ways to verl's."""
    names = ("generator_stall_s", "trainer_stall_s")
    return {
        name.removesuffix("_s") + way.removeprefix("dual_buffer"): row[way][name]["median"]
        / row[STOCK][name]["median"]
        for way in _ways(row)
        if way != STOCK and STOCK in row
        for name in names
        if name in row[way] and row[STOCK].get(name, {}).get("median")
    }


def table(data: Mapping[str, Any]) -> str:
    """Return a Markdown table of medians in milliseconds [min .. max], with ratios and rates."""
    rows, notes = [], list[str]()
    for number, row in data["replicas"].items():
        for way in _ways(row):
            rows.append([number, f"`{way}`", *_cells(row[way])])
            notes += _rates(f"{way}, {number} replicas", row[way])
            notes += _unhidden(f"{way}, {number} replicas", row[way])
        if "ratios" in row:
            shown = ", ".join(
                f"{name.replace('_', ' ')} {value:.2f}" for name, value in row["ratios"].items()
            )
            notes.append(f"dual_buffer / verl_stock, {number} replicas: {shown}")

    notes.append(_in_gb_s("limits of the idle machine", data["limits"]))
    parts = (name.removesuffix("_s").replace("_", " ") for name in COLUMNS)
    header = ["replicas", "ms", *parts, "hidden", "update", "host memory"]
    return "\n".join([render_table(header, rows), "", *notes])


def _ways(row: Mapping[str, Any]) -> list[str]:
    return [name for name in row if name != "ratios"]


def _cells(of: Mapping[str, Any]) -> list[str]:
    hidden, growth, memory = (
        of.get("hidden_fraction"),
        of.get("publication_growth"),
        of.get("host_memory_versions"),
    )
    return [
        *(render_spread(of[name], ".0f", 1e3) if of.get(name) else "" for name in COLUMNS),
        f"{hidden['median']:.0%}" if hidden else "",
        f"{growth:.2f} ×" if growth else "",
        f"{memory:.2f} versions" if memory else "",
    ]


def _rates(title: str, of: Mapping[str, Any]) -> list[str]:
    rates = {name: value for name, value in of.items() if name.endswith("_gb_s")}
    if not rates:
        return []
    shares = "; ".join(f"{part} {share:.0%} of a plain copy" for part, share in of["share_of_memcpy"].items())
    under_load = of.get("limits_under_load")
    return [
        f"{_in_gb_s(title, rates)}{f' ({shares})' if shares else ''}",
        *([_in_gb_s(f"limits during generation ({title})", under_load)] if under_load else []),
    ]


def _unhidden(title: str, of: Mapping[str, Any]) -> list[str]:
    if "unhidden_s" not in of:
        return []
    parts = ", ".join(f"{name} {seconds * 1e3:.0f}" for name, seconds in of["unhidden_s"].items())
    return [f"parts of the stalls ({title}), ms: {parts}"]


def _in_gb_s(title: str, rates: Mapping[str, float]) -> str:
    return f"{title}, GB/s: " + ", ".join(f"{k.removesuffix('_gb_s')} {v:.1f}" for k, v in rates.items())
