# SPDX-License-Identifier: Apache-2.0
"""What whole jobs of these tests run in place of our own: agent loops, and strategies to compare with."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

from recipe.async_pipeline.core.groups.items import Admission, Group, Prompt, Publication, StepBatch
from recipe.async_pipeline.core.groups.recall import Recall
from recipe.async_pipeline.core.schedule import Schedule
from recipe.async_pipeline.lab.gpu_kit.seeded_loop import seed_of
from recipe.async_pipeline.strategies import FullyAsync, NStepAhead
from recipe.async_pipeline.strategies import OneStepOff as OneStepOffSchedule
from recipe.async_pipeline.verl_bridge.agent_loop.episodes.environment_loop import EnvironmentLoop
from recipe.async_pipeline.verl_bridge.agent_loop.sessions.agent_session_loop import AgentSessionLoop
from recipe.async_pipeline.verl_bridge.trainer.pipeline_run import PipelineRun
from recipe.async_pipeline.verl_bridge.trainer.verl_trainer import VerlTrainer
from tests.e2e.job import STRAGGLES_S, UPDATE_S


class SeededEpisodes(EnvironmentLoop):  # type: ignore[misc]
    """An episode in an environment, whose sampling depends on the same."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        return await super().run({**sampling_params, "seed": seed_of(kwargs)}, **kwargs)


class SeededSessions(AgentSessionLoop):  # type: ignore[misc]
    """A program that plays over HTTP, whose answers are sampled so that they depend on the same."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        return await super().run({**sampling_params, "seed": seed_of(kwargs)}, **kwargs)


class StragglerLoop(SingleTurnAgentLoop):  # type: ignore[misc]
    """One turn; of every sixth prompt, the first requested response takes far longer than a step."""

    _asked: ClassVar[set[str]] = set()

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        uid = str(kwargs["uid"])
        if int(kwargs["index"]) % 6 == 0 and uid not in self._asked:
            self._asked.add(uid)
            await asyncio.sleep(STRAGGLES_S)
        return await super().run(sampling_params, **kwargs)


def _die_once_for_each(marks: Path) -> None:
    for mark in marks.iterdir():
        mark.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


class DiesInValidation(SingleTurnAgentLoop):  # type: ignore[misc]
    """One turn; the process ends in the first validation, once for each file that it can remove from the
    folder `ASYNC_PIPELINE_TEST_DEATHS`.
    """

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        if kwargs["extra_info"]["split"] != "train" and int(kwargs["index"]) % 8 == 0:
            _die_once_for_each(Path(os.environ["ASYNC_PIPELINE_TEST_DEATHS"]))
        return await super().run(sampling_params, **kwargs)


class FlawedLoop(SingleTurnAgentLoop):  # type: ignore[misc]
    """One turn; by its number, a prompt's answers are empty, masked, missing or not finite, or the prompt
    is too long.
    """

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        flaw = int(kwargs["index"]) % 20
        if flaw == 0:
            self._cap_text_prompt_length([1] * 100)
        if flaw == 1 and int(kwargs["session_id"]) == 0:
            return []
        output = await super().run(sampling_params, **kwargs)
        if flaw == 2:
            output.response_ids, output.response_mask, output.response_logprobs = [], [], []
        if flaw == 3:
            output.response_mask = [0] * len(output.response_mask)
        if flaw == 4:
            output.response_logprobs[-1] = float("nan")
        return output


class _AtBatchBoundaries(PipelineRun):
    """Version v is loaded when batch v+1 is generated, so that no batch is written by two versions."""

    _answered = 0
    _more: asyncio.Event | None = None

    async def generate_group(self, prompt: Prompt, recall: Recall) -> Group | None:
        group: Group | None = await super().generate_group(prompt, recall)
        self._answered += 1
        self._more = self._more or asyncio.Event()
        self._more.set()
        return group

    async def publish(self, version: int, snapshot: object) -> Publication:
        batch = self.config.data.train_batch_size
        while version > 0 and self._answered < batch * min(version + 1, self.schedule.last_step):
            self._more = asyncio.Event()
            await self._more.wait()
        return await super().publish(version, snapshot)


class OneStepOff(VerlTrainer):  # type: ignore[misc]
    run_class = _AtBatchBoundaries
    schedule_class = OneStepOffSchedule


class OneAhead(VerlTrainer):  # type: ignore[misc]
    run_class = _AtBatchBoundaries
    schedule_class = NStepAhead


class _SlowUpdates(PipelineRun):
    """An update takes ten times as long as the answers of its batch do."""

    async def update(self, batch: StepBatch) -> StepBatch:
        await asyncio.sleep(UPDATE_S)
        return await super().update(batch)


class SlowlyTrained(VerlTrainer):  # type: ignore[misc]
    run_class = _SlowUpdates
    schedule_class = FullyAsync


SHOWN = ("lag/mean", "lag/max", "version/served_min", "queue/untrained", "queue/finished")
"""Facts of a step that the line for the user shows."""


class _Sequential(PipelineRun):
    """Lag 1 without any concurrency: while step s could train, batch s+1 is generated by the weights of
    step s-1.
    """

    _flow: Any = SimpleNamespace(checkpoints=SimpleNamespace(saves=lambda _: False))

    def run(self, agent_loop_manager: Any) -> None:
        self.open(agent_loop_manager)
        asyncio.run(self._loop())

    def _note(self, stage: str, event: str, **fields: Any) -> None:
        """There is no pipeline, and so no log of its events."""

    async def _loop(self) -> None:
        await self.publish(0, await self.gather(0))
        batch = await self._generate(1)
        for step in range(1, self.schedule.last_step + 1):
            ahead = await self._generate(step + 1) if step < self.schedule.last_step else None
            trained = await self._train(step, batch)
            await self.finish_step(trained, dict.fromkeys(SHOWN, 0.0))
            await self.publish(step, await self.gather(step))
            batch = ahead or []
        await self._save_actor(self.schedule.last_step)

    async def _save_actor(self, step: int) -> None:
        """Write what the trained weights are read from, where a checkpoint would have it."""
        folder = Path(self.config.trainer.default_local_dir) / f"global_step_{step}" / "actor"
        await self.calls(
            self.verl.actor_rollout_wg.save_checkpoint, str(folder), None, step, max_ckpt_to_keep=None
        )

    async def _generate(self, step: int) -> list[Group]:
        drawn = await self.draw_prompts(
            Admission(step=step, prompts=self.config.data.train_batch_size, version=0)
        )
        groups = await asyncio.gather(*(self.generate_group(prompt, Recall()) for prompt in drawn.prompts))
        return [group for group in groups if group is not None]

    async def _train(self, step: int, groups: list[Group]) -> StepBatch:
        batch = await self.assemble(step, groups)
        batch = await self.compute_log_probs(batch)
        batch = await self.compute_advantages(batch)
        return await self.update(batch)


class Reference(VerlTrainer):  # type: ignore[misc]
    run_class = _Sequential
    schedule_class = Schedule
