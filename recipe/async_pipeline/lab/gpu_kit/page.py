# SPDX-License-Identifier: Apache-2.0
"""The report of `async-pipeline verify-gpu`, as a page and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from ...tools.report.html_page import page
from .steps import FAILED, NOT_RUN, PASSED, Result


def as_json(machine: Mapping[str, Any], device: str, results: Sequence[Result]) -> dict[str, Any]:
    """Return everything that the report says."""
    return {
        "machine": dict(machine),
        "device": device,
        "steps": [dataclasses.asdict(result) for result in results],
        **counts(results),
    }


def counts(results: Sequence[Result]) -> dict[str, int]:
    """Return how many steps passed, failed and were not run."""
    return {
        status.replace(" ", "_"): sum(result.status == status for result in results)
        for status in (PASSED, FAILED, NOT_RUN)
    }


def in_words(results: Sequence[Result]) -> str:
    """Return the counts as a phrase."""
    return ", ".join(f"{number} {name.replace('_', ' ')}" for name, number in counts(results).items())


def report_page(machine: Mapping[str, Any], device: str, results: Sequence[Result]) -> str:
    """Return the page."""
    facts = "".join(
        f"<li>{escape(str(k))} {escape(str(v))}</li>" for k, v in machine.items() if v is not None
    )
    sections = "".join(_section(result) for result in results)
    body = (
        f"<header><h1>What works on this machine</h1><p>{escape(in_words(results))}, on the device "
        f'{escape(device)}.</p><ul class="facts">{facts}</ul></header>{sections}'
    )
    return page("verify-gpu", body)


def rounded(value: Any) -> str:
    """Return a value for a reader: a float with three significant digits, anything else as it is."""
    if not isinstance(value, float):
        return str(value)
    short = float(f"{value:.3g}")
    return f"{short:,.0f}" if 1000 <= abs(short) < 1e15 else f"{short:.3g}"


def _section(result: Result) -> str:
    took = f" in {result.seconds:.0f} s" if result.status == PASSED else ""
    rows = "".join(
        f"<tr><th>{escape(one.name)}</th><td>{escape(rounded(one.value))}</td><td>{escape(one.meaning)}</td></tr>"
        for one in result.figures or ()
    )
    figures = f"<table>{rows}</table>" if rows else ""
    detail = f"<pre>{escape(result.detail)}</pre>" if result.detail else ""
    return (
        f'<section id="{escape(result.name)}"><h2>{escape(result.name)}: {escape(result.status)}{took}</h2>'
        f"<p>{escape(result.shows)}</p>{figures}{detail}</section>"
    )
