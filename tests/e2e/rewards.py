# SPDX-License-Identifier: Apache-2.0
"""A reward function that breaks. Loaded by verl from this file."""

from __future__ import annotations

from typing import Any


def raises(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    raise ValueError("the judge fell asleep")


def nothing(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any
) -> float:
    """NaN for one sum in ten; else right or wrong."""
    return float("nan") if int(ground_truth) % 10 == 7 else float(solution_str == ground_truth)


def hogs(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """Never comes back for one sum in ten; else right or wrong."""
    while int(ground_truth) % 10 == 7:
        pass
    return float(solution_str == ground_truth)
