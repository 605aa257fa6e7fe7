# SPDX-License-Identifier: Apache-2.0
"""The rule that scores one answer. verl loads this file by path, so it needs the standard library only."""

from __future__ import annotations

import re
from typing import Any

# Ten digits are far more than any sum here has: a longer string is a failure to stop, not a number.
_ANSWER = re.compile(r"[0-9]{1,10}")


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **_: Any
) -> float:
    """1.0 if the whole answer is exactly the right number, else 0.0.

    `solution_str` is the decoded answer without special tokens. The mean over answers is therefore the
    share of right answers. An answer that never stopped, has other characters or a leading zero is wrong.
    """
    del data_source, extra_info
    if _ANSWER.fullmatch(solution_str) is None:
        return 0.0
    return float(solution_str == str(ground_truth))
