# SPDX-License-Identifier: Apache-2.0
"""A reward function that breaks. Loaded by verl from this file."""

from __future__ import annotations

from typing import Any


def raises(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    raise ValueError("the judge fell asleep")
