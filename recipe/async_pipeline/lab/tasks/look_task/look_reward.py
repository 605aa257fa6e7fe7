# SPDX-License-Identifier: Apache-2.0
"""The rule that scores an answer about a picture. Loaded by path: standard library only."""

from __future__ import annotations

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **_: Any
) -> dict[str, float]:
    """Return 1.0 for the right count, colour and shape, else 0.0; and each of the three by itself.

    `solution_str` is the response without special tokens.
    """
    del data_source, extra_info
    said, wanted = solution_str.split(" "), ground_truth.split(" ")
    right = [
        float(len(said) == len(wanted) and one == other) for one, other in zip(said, wanted, strict=False)
    ]
    right += [0.0] * (len(wanted) - len(right))
    return {"score": float(all(right)), "count": right[0], "colour": right[1], "shape": right[2]}
