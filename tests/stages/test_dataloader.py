# SPDX-License-Identifier: Apache-2.0
"""dataloader: steps in order, as admitted, until the last."""

from __future__ import annotations

import asyncio

import pytest

from recipe.async_pipeline.core.clock import run_virtual
from recipe.async_pipeline.core.items import Admission, Group, Prompt, PromptBatch, Trajectory
from recipe.async_pipeline.core.state_machine import StageState
from recipe.async_pipeline.errors import ConservationError, WaitTimeout
from tests.fakes.trainer import SimTrainer
from tests.stages.conftest import MakeRole


def test_draws_the_steps_in_order_and_ends_after_the_last(alone: MakeRole) -> None:
    machine = alone("dataloader", SimTrainer(steps=4, max_lag=4))
    machine.pipeline.versions.advance_gathered(0)
    machine.pipeline.versions.advance_served(0)

    async def main() -> list[PromptBatch]:
        task = asyncio.create_task(machine.run())
        batches = [await machine.outputs[0].receive() for _ in range(4)]
        for step, batch in enumerate(batches, start=1):
            for prompt in batch.prompts:
                trajectory = Trajectory(key=prompt.uid, first_version=0, last_version=0, num_tokens=1)
                machine.pipeline.queue.put(Group(uid=prompt.uid, step=step, trajectories=(trajectory,)))
            assert machine.pipeline.queue.take(step)
        await task
        return batches

    batches = run_virtual(main())
    assert [b.step for b in batches] == [1, 2, 3, 4]
    assert [b.admitted_version for b in batches] == [0, 0, 0, 0]
    assert machine.state is StageState.DONE
    assert machine.pipeline.fates.drawn == 12


def test_waits_until_weights_that_are_new_enough_are_served(alone: MakeRole) -> None:
    trainer = SimTrainer(steps=4, max_lag=1)
    machine = alone("dataloader", trainer)
    versions = machine.pipeline.versions

    async def main() -> None:
        task = asyncio.create_task(machine.run())
        await asyncio.sleep(1)
        assert trainer.calls == [], "not even the starting weights are served"
        for version in (0, 1):
            versions.advance_trained(version)
            versions.advance_gathered(version)
            versions.advance_served(version)
            await asyncio.sleep(1)
            assert trainer.calls == [f"draw:{step}" for step in range(1, version + 3)]
        task.cancel()
        await asyncio.wait([task])

    run_virtual(main())


def test_says_what_it_waits_for(alone: MakeRole) -> None:
    with pytest.raises(WaitTimeout, match="dataloader waited 1000 s for leave to draw prompts"):
        run_virtual(alone("dataloader", SimTrainer()).run())


def test_a_prompt_that_comes_twice_is_caught(alone: MakeRole) -> None:
    class Repeats(SimTrainer):
        async def draw_prompts(self, admission: Admission) -> PromptBatch:
            return PromptBatch(
                step=admission.step,
                prompts=(Prompt(uid="same", step=admission.step),),
                admitted_version=admission.version,
            )

    machine = alone("dataloader", Repeats(max_lag=4))
    machine.pipeline.versions.advance_gathered(0)
    machine.pipeline.versions.advance_served(0)
    with pytest.raises(ConservationError, match="same was drawn twice"):
        run_virtual(machine.run())
