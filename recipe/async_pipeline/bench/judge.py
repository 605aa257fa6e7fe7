# SPDX-License-Identifier: Apache-2.0
"""The toy's rule as a judge that takes its time. verl loads this file by its module's name."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import defaultdict
from typing import Any

from ..toy.reward import compute_score as toy_score
from .spans import of_this_job
from .waits import Lognormal

_calls: defaultdict[int, itertools.count[int]] = defaultdict(itertools.count)
"""How often each prompt was judged here: the waits of a prompt are the same in every arm, in any order."""


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
    """Score the last line of an answer, after a wait that the seed, the prompt and a count decide."""
    prompt = int(extra_info["index"])
    started = time.monotonic()
    await asyncio.sleep(Lognormal(**wait).draw(seed, "judge", prompt, next(_calls[prompt])))
    of_this_job().add("judge", started, prompt=prompt)
    return toy_score(data_source, solution_str.rpartition("\n")[2], ground_truth)

