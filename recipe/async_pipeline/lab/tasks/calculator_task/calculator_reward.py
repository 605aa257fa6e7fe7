# SPDX-License-Identifier: Apache-2.0
"""The rule that scores an episode with the calculator. Loaded by path: standard library only."""

from __future__ import annotations

import re
from typing import Any

COST = 0.2
"""What a call takes off the score; `calculator.COST` is the same."""
_EPISODE = re.compile(r"(?P<calls>(?:\[[0-9]+\+[0-9]+\]\n[0-9]+>)*)(?P<answer>[0-9]{1,10})")


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **_: Any
) -> dict[str, float]:
    """Return 1.0 for the right number, less the cost of each call, else 0.0 less that; and both parts.

    `solution_str` is the whole episode without special tokens: calls, each with what the tool answered, and
    the answer. A turn that is neither a call nor a number is wrong.
    """
    del data_source, extra_info
    calls = solution_str.count(RESULT)
    found = _EPISODE.fullmatch(solution_str)
    right = float(found is not None and found["answer"] == str(ground_truth))
    return {"score": right - COST * calls, "acc": right, "calls": float(calls)}


RESULT = ">"
"""Ends what the tool answers, and is nowhere else in a well-formed episode."""
