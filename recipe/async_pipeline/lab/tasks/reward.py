# SPDX-License-Identifier: Apache-2.0
"""The rule that scores one response. verl loads this file by path: standard library only."""

from __future__ import annotations

import re
from typing import Any

# No sum here has ten digits: a longer string means that the model did not stop.
_ANSWER = re.compile(r"[0-9]{1,10}")


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **_: Any
) -> float:
    """Return 1.0 if the whole response is exactly the right number, else 0.0.

    `solution_str` is the decoded response without special tokens. A response that does not stop, contains
    other characters or has a leading zero is wrong. The mean over responses is the share of correct ones.
    """
    del data_source, extra_info
    if _ANSWER.fullmatch(solution_str) is None:
        return 0.0
    return float(solution_str == str(ground_truth))
