# SPDX-License-Identifier: Apache-2.0
"""A reward that costs nothing: responses of a group differ, except in the groups to be filtered.

verl loads this file by its module name.
"""

from __future__ import annotations

import zlib
from typing import Any

_UNIFORM = 2**32


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any],
    *,
    filtered: float,
    **_: Any,
) -> float:
    """Return 0.0 for every response to the share `filtered` of prompts, else a number in (0, 1)."""
    del data_source, ground_truth
    if _fraction(f"prompt {extra_info['index']}") < filtered:
        return 0.0
    return _fraction(solution_str)


def _fraction(text: str) -> float:
    return (zlib.crc32(text.encode()) + 0.5) / _UNIFORM
