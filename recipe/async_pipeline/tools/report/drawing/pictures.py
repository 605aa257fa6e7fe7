# SPDX-License-Identifier: Apache-2.0
"""The section of a report about what an image policy drew: pictures by step and version."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence

from markupsafe import Markup

from ....observe.run_directory.picture_folder import Picture
from ..html_page import part
from .charts import Line, figure, line_chart
from .series import Series
from .wording import amount

SHOWN_STEPS = 8
"""Rows of the grid: the first and the last step, and others evenly between them."""


def pictures(found: Sequence[Picture], mismatch: Series) -> Markup:
    """Return a grid with a row for each shown step, and a chart of how far engine and trainer disagree."""
    if not found:
        return Markup()
    by_step: dict[int, list[Picture]] = {}
    for one in found:
        by_step.setdefault(one.step, []).append(one)
    steps = spread(sorted(by_step), SHOWN_STEPS)
    rows = [(step, _versions(by_step[step]), [*map(_cell, by_step[step])]) for step in steps]
    grid = figure(
        "Pictures by step, with the version that drew them",
        part("pictures", rows),
        note=f"{len(steps)} of {len(by_step)} steps with pictures. Under each: its prompt and its reward.",
        wide=True,
    )
    chart = line_chart(
        "Largest difference of log-probs between engine and trainer on the same weights",
        [Line(label="difference", series=mismatch, colour="c-logp")],
        x_label="step",
        low=0.0,
        note="Compare it with the clip range: such a difference counts as a move of the policy.",
    )
    return grid + chart


def spread(steps: Sequence[int], count: int) -> Sequence[int]:
    """Return at most `count` of the steps, evenly spaced, with the first and the last."""
    if len(steps) <= count:
        return steps
    return [steps[round(n * (len(steps) - 1) / (count - 1))] for n in range(count)]


def _versions(row: Sequence[Picture]) -> str:
    first, last = min(one.first_version for one in row), max(one.last_version for one in row)
    return f"version {first}" if first == last else f"versions {first} to {last}"


def _cell(one: Picture) -> tuple[str, str, str]:
    """Return the source, the prompt and the reward of a picture."""
    reward = "" if one.reward is None else f"reward {amount(one.reward)}"
    return f"data:image/png;base64,{b64encode(one.png).decode()}", one.prompt, reward
