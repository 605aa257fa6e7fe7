# SPDX-License-Identifier: Apache-2.0
"""Whether a run can score what has no reward: verl's own reward function knows few data sources."""

from __future__ import annotations

from functools import cache
from typing import Any

from omegaconf import OmegaConf


def can_score(config: Any, data_source: str | None) -> bool:
    """Return whether the run has a reward function or model, or verl's default function knows the source.

    `config`: the whole config.
    """
    own = ("custom_reward_function.path", "reward_model.enable", "reward_manager.module.path")
    reward = OmegaConf.select(config, "reward")
    if reward is None or any(OmegaConf.select(reward, name) for name in own):
        return True
    return data_source is not None and verl_knows(data_source)


@cache
def verl_knows(data_source: str) -> bool:
    """Return whether verl's default reward function scores a data source."""
    from verl.utils.reward_score import default_compute_score

    try:
        default_compute_score(data_source, "", "")
    except NotImplementedError:
        return False
    except Exception:  # noqa: BLE001 - it knows the data source, but there is nothing to score
        return True
    return True
