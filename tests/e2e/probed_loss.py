# SPDX-License-Identifier: Apache-2.0
"""PPO's loss that also writes down the log-probs it is given. Named by `model.external_lib`, so that
verl's workers import it.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import torch
from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla, register_policy_loss

FOLDER = "ASYNC_PIPELINE_LOG_PROBS"
"""Environment variable: where the files go, one for each call."""
NAME = "probed"
_calls = itertools.count()


@register_policy_loss(NAME)
def probed(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    rows = [
        (old[real].tolist(), new[real].tolist())
        for old, new, real in zip(old_log_prob.detach(), log_prob.detach(), response_mask.bool(), strict=True)
    ]
    torch.save(rows, Path(os.environ[FOLDER]) / f"{next(_calls):05d}.pt")
    return compute_policy_loss_vanilla(old_log_prob, log_prob, advantages, response_mask, *args, **kwargs)
