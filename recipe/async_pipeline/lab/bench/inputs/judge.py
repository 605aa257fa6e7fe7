# SPDX-License-Identifier: Apache-2.0
"""Score the toy task after a simulated delay. verl loads this file by its module name."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from ...tasks.reward import compute_score as toy_score
from ..measuring.spans import of_this_job
from .waits import LognormalWait


async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any],
    *,
    seed: int,
    wait: dict[str, float],
    **_: Any,
) -> float:
    """Score the last line of a response after a delay drawn from seed, prompt and index of the response."""
    prompt, session = int(extra_info["index"]), int(extra_info["session"])
    started = time.monotonic()
    await asyncio.sleep(LognormalWait(**wait).draw(seed, "judge", prompt, session))
    of_this_job().add("judge", started, prompt=prompt)
    return toy_score(data_source, solution_str.rpartition("\n")[2], ground_truth)
