# SPDX-License-Identifier: Apache-2.0
"""An exact-match reward function that misbehaves for one response in four, if its control file requests it.

The scoring processes load this file by path, so it imports nothing from this package.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

MOODS = ("slow", "raise", "hang")
"""The misbehaviours that the control file can request."""
SLOW_S = 1.0


def score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Any = None,
    control: str = "",
    **_: Any,
) -> float:
    """Return 1.0 or 0.0. `control`: a file that contains one of `MOODS`; empty or missing means none."""
    if int(ground_truth) % 4 == 0:
        _misbehave(Path(control))
    return float(solution_str == ground_truth)


def _misbehave(control: Path) -> None:
    mood = control.read_text(encoding="utf-8") if control.is_file() else ""
    if mood in MOODS:
        Path(f"{control}.seen").touch()
    if mood == "slow":
        time.sleep(SLOW_S)
    elif mood == "raise":
        raise RuntimeError("the control file requests an exception")
    while mood == "hang":
        pass
