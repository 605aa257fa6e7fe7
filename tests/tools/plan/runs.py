# SPDX-License-Identifier: Apache-2.0
"""Run directories in the format of real runs, made by simulating known costs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from recipe.async_pipeline.config.derived.scheduling import as_settings
from recipe.async_pipeline.core.events import EventLog
from recipe.async_pipeline.core.flow import AsyncTrainingFlow
from recipe.async_pipeline.core.groups.items import Group, Prompt
from recipe.async_pipeline.core.groups.recall import Recall
from recipe.async_pipeline.core.waits.clock import run_virtual
from recipe.async_pipeline.tools.plan.simulated.draws import GroupCost
from recipe.async_pipeline.tools.plan.simulated.trainer import Setting, SimulatedTrainer


class LoggingTrainer(SimulatedTrainer):
    """Also logs each group as the trainer of a real run does.

    For engines with a speed that does not depend on their load.
    """

    log: EventLog

    async def generate_group(self, prompt: Prompt, recall: Recall) -> Group | None:
        began = self.log.append("generate", "ASKED").t
        group = await super().generate_group(prompt, recall)
        costs: GroupCost = prompt.payload
        answers, token_s = costs.answers, self.profile.decode.step_s(1)
        request_s = self.profile.answers.request_s
        columns: dict[str, Any] = {
            "prompt_tokens": [int(a.prompt_tokens) for a in answers],
            "tokens": [sum(a.turn_tokens) for a in answers],
            "observation_tokens": [a.tokens - int(a.prompt_tokens) - sum(a.turn_tokens) for a in answers],
            "turns": [len(a.turn_tokens) for a in answers],
            "generate_s": [sum(a.turn_tokens) * token_s + len(a.turn_tokens) * request_s for a in answers],
            "environment_s": [sum(s - request_s for s in a.tool_s) for a in answers],
            "score_s": [a.reward_s - request_s for a in answers],
        }
        seconds = self.log.append("generate", "ASKED").t - began
        self.log.append("generate", "ANSWERED", key=prompt.uid, seconds=seconds, **columns)
        if group is None:
            return None
        spent = map(
            sum, zip(columns["generate_s"], columns["environment_s"], columns["score_s"], strict=True)
        )
        answered = tuple(replace(t, seconds=s) for t, s in zip(group.trajectories, spent, strict=True))
        return replace(group, trajectories=answered)


def write_run(setting: Setting, directory: Path) -> None:
    """Simulate, and write `events.jsonl` and `settings.json`."""
    trainer = LoggingTrainer(setting)
    flow = AsyncTrainingFlow(trainer)
    trainer.log = flow.log
    run_virtual(flow.run())
    directory.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(record.as_dict()) for record in flow.log.records]
    (directory / "events.jsonl").write_text("\n".join(lines) + "\n")
    knobs = setting.knobs
    settings = as_settings(knobs, knobs.training.old_logp) | {
        "placement": setting.placement.as_list(),
        "groups": setting.groups,
        "answers": setting.profile.batch.answers,
        "devices_per_replica": setting.profile.devices_per_replica,
        "devices_per_node": setting.profile.devices_per_node,
        "slots": setting.profile.decode.slots,
    }
    (directory / "settings.json").write_text(json.dumps(settings))
