# SPDX-License-Identifier: Apache-2.0
"""The rule that scores an answer about words. Loaded by path: standard library only."""

from __future__ import annotations

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **_: Any
) -> float:
    """Return 1.0 for the right words and nothing else, but for case and a last full stop; else 0.0.

    `solution_str` is the response without special tokens.
    """
    del data_source, extra_info
    return float(solution_str.strip().lower().removesuffix(".") == ground_truth)
