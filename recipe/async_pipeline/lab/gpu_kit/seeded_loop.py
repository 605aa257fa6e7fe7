# SPDX-License-Identifier: Apache-2.0
"""Responses that two runs with the same weights write alike, to compare the runs.

verl's key `rollout.agent.agent_loop_config_path` names a file that lists the class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop


def seed_of(row: Mapping[str, Any]) -> int:
    """Return a seed that depends only on the prompt, the batch that it was drawn in, and the number of the
    response in its group.
    """
    return (int(row["global_steps"]) * 10_007 + int(row["index"])) * 101 + int(row["session_id"])


class SeededLoop(SingleTurnAgentLoop):  # type: ignore[misc]
    """One turn, sampled with `seed_of` its row."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        return await super().run({**sampling_params, "seed": seed_of(kwargs)}, **kwargs)
