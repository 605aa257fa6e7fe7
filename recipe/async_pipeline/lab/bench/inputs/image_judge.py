# SPDX-License-Identifier: Apache-2.0
"""Score a picture of the image task after a simulated delay. verl loads this file by its module name."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from ...tasks.image_task.image_reward import compute_score as picture_score
from ..measuring.spans import of_this_job
from .waits import LognormalWait


async def compute_score(
    data_source: str,
    solution_image: Any,
    ground_truth: str,
    extra_info: dict[str, Any],
    *,
    seed: int,
    wait: dict[str, float],
    **_: Any,
) -> dict[str, float]:
    """Score a picture after a delay drawn from seed, prompt and number of the sample."""
    prompt, session = int(extra_info["index"]), int(extra_info.get("session", 0))
    started = time.monotonic()
    await asyncio.sleep(LognormalWait(**wait).draw(seed, "judge", prompt, session))
    of_this_job().add("judge", started, prompt=prompt)
    return picture_score(data_source, solution_image, ground_truth)
