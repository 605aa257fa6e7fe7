# SPDX-License-Identifier: Apache-2.0
"""Right or wrong, unless the file named `control` says that one answer in four is to be judged badly.

Loaded by the processes that score, so it imports nothing of ours.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

MOODS = ("slow", "raise", "hang")
SLOW_S = 1.0


def score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Any = None,
    control: str = "",
    **_: Any,
) -> float:
    """1.0 or 0.0. `control`: a file with one of `MOODS`; empty or missing, all is well."""
    if int(ground_truth) % 4 == 0:
        _misbehave(Path(control))
    return float(solution_str == ground_truth)


def _misbehave(control: Path) -> None:
    mood = control.read_text() if control.is_file() else ""
    if mood == "slow":
        time.sleep(SLOW_S)
    elif mood == "raise":
        raise RuntimeError("the judge was told to raise")
    while mood == "hang":
        pass
