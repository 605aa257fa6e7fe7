# SPDX-License-Identifier: Apache-2.0
"""Whether a run can score what has no reward: verl's own reward function knows few data sources."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from ...config.paths import select
from ..launch.light_verl import compute

FUNCTION = "verl.utils.reward_score.default_compute_score"
SCORERS = ("custom_reward_function.path", "reward_model.enable", "reward_manager.module.path")


def can_score(config: Mapping[str, Any], data_source: str | None) -> bool:
    """Return whether the run has a reward function or model, or verl's default function knows the source.

    `config`: the whole config.
    """
    return not uses_default(config) or (data_source is not None and verl_knows(data_source))


def uses_default(config: Mapping[str, Any]) -> bool:
    """Return whether verl's default function scores the responses of a run."""
    reward = select(config, "reward")
    return reward is not None and not any(select(reward, name) for name in SCORERS)


@cache
def verl_knows(data_source: str) -> bool:
    """Return whether verl's default reward function scores a data source."""

    def work() -> bool:
        from verl.utils.reward_score import default_compute_score

        try:
            default_compute_score(data_source, "", "")
        except NotImplementedError:
            return False
        except Exception:  # noqa: BLE001 - it knows the data source, but there is nothing to score
            return True
        return True

    return compute(work, [FUNCTION])
