# SPDX-License-Identifier: Apache-2.0
"""The report of `async-pipeline verify-gpu`, as a page and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

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
    """Return the page. Call this only where jinja2 is installed."""
    # verify-gpu also runs where nothing is installed, and says so.
    from ...tools.report.html_page import page

    sections = [
        (
            result,
            result.status if result.status == NOT_RUN else f"{result.status} after {result.seconds:.0f} s",
            [(one.name, rounded(one.value), one.meaning) for one in result.figures or ()],
        )
        for result in results
    ]
    return page(
        "lab/gpu_kit/page.html",
        title="verify-gpu",
        counts=in_words(results),
        device=device,
        facts=[(name, value) for name, value in machine.items() if value is not None],
        sections=sections,
    )


def rounded(value: Any) -> str:
    """Return a value for a reader: a float with three significant digits, anything else as it is."""
    if not isinstance(value, float):
        return str(value)
    short = float(f"{value:.3g}")
    return f"{short:,.0f}" if 1000 <= abs(short) < 1e15 else f"{short:.3g}"
