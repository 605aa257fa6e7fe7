# SPDX-License-Identifier: Apache-2.0
"""Give all rows of a session the advantage of the session, also if its last row has nothing left to train.

With GRPO, verl computes the advantage of a session from the score of its last row, reads it at the first
token of that row that is trained, and gives it to the other rows. If the tokens of the last row are masked,
because they are too old (`stale_tokens`) or were rejected, verl reads a zero there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl.trainer.ppo.core_algos import AdvantageEstimator
from verl.trainer.ppo.v1 import utils

MASK, RESULTS = "response_mask", ("advantages", "returns")


def advantages(data: Any, batch_keys: Sequence[str], adv_estimator: Any, **options: Any) -> Any:
    """Return what verl's `compute_advantage_for_multi_trajectories` returns.

    Rows without a trained token get one while it computes, so that the advantage of the session can be read.
    """
    mask = data.batch[MASK]
    lost = mask.sum(-1) == 0
    stock = utils.compute_advantage_for_multi_trajectories
    if adv_estimator != AdvantageEstimator.GRPO or not lost.any():
        return stock(data, batch_keys, adv_estimator, **options)

    lent = mask.clone()
    lent[lost, 0] = 1
    data.batch[MASK] = lent
    try:
        done = stock(data, batch_keys, adv_estimator, **options)
    finally:
        data.batch[MASK] = mask

    done.batch[MASK] = mask
    for name in RESULTS:
        done.batch[name] = done.batch[name] * mask
    return done
