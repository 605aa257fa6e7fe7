# SPDX-License-Identifier: Apache-2.0
"""Pipelines that stand still for a reason, each of which the diagnosis has to name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from recipe.async_pipeline import AsyncTrainingFlow
from recipe.async_pipeline.core.groups.items import Group, Prompt, Publication, StepBatch
from recipe.async_pipeline.core.waits.clock import run_virtual
from recipe.async_pipeline.core.waits.deadline import within
from recipe.async_pipeline.core.waits.diagnosis import LAST_EVENTS, Diagnosis, diagnose
from recipe.async_pipeline.core.waits.wait_graph import Holders, Wait, waits_of
from recipe.async_pipeline.errors import WaitTimeout
from tests.fakes.trainer import SimTrainer

NEVER_S = 1e9


def recorder(flow: AsyncTrainingFlow, found: list[Diagnosis]) -> Callable[[Wait], str]:
    """Return a callback for expired waits that appends each diagnosis to `found`."""

    def record(wait: Wait) -> str:
        found.append(diagnose(flow, wait))
        return ""

    return record


def expired(
    trainer: SimTrainer, prepare: Callable[[AsyncTrainingFlow], Any] = lambda flow: None
) -> list[Diagnosis]:
    """Run until a wait expires; what each expiry was found to be."""
    found: list[Diagnosis] = []

    async def main() -> None:
        flow = AsyncTrainingFlow(trainer)
        waits_of().on_expiry = recorder(flow, found)
        held = prepare(flow)
        with pytest.raises(WaitTimeout):
            await flow.run()
        del held

    run_virtual(main())
    return found


def test_a_replica_that_never_answers() -> None:
    class Silent(SimTrainer):
        async def answer(self, prompt: Prompt) -> Group:
            if prompt.step == 2:
                await asyncio.sleep(NEVER_S)
            return await super().answer(prompt)

    first = expired(Silent(max_lag=1))[0]
    assert first.cause == (
        "generate is RUNNING since 996.2 s, waiting for a group to be answered; "
        "param_update waited 1000.0 s for an item from train->param_update"
    )
    assert "generate waits since 996.2 s (of at most 1000 s) for a group to be answered" in first.text
    assert "3 groups are being answered or scored, the oldest since 1000.0 s (step 2 key p2.0)" in first.text
    assert "train waits since" in first.text, "and every stage behind it"


def test_a_publication_that_is_lost() -> None:
    class Lost(SimTrainer):
        async def publish(self, version: int, snapshot: object) -> Publication:
            if version == 2:
                await asyncio.sleep(NEVER_S)
            return await super().publish(version, snapshot)

    first = expired(Lost(max_lag=1))[0]
    assert first.cause.startswith("param_update")
    assert " is RUNNING since " in first.cause
    assert "versions: trained 3, gathered 3, served 1" in first.text


def test_a_device_that_is_held_for_ever() -> None:
    class Stuck(SimTrainer):
        async def update(self, batch: StepBatch) -> StepBatch:
            if batch.step == 3:
                # As the bridge does around a call of verl.
                await within(
                    asyncio.sleep(NEVER_S), None, owner="train", what="the call of verl, _update_actor"
                )
            return await super().update(batch)

    first = expired(Stuck(max_lag=1))[0]
    assert first.cause.startswith(
        "train is RUNNING since 998.2 s, waiting for the call of verl, _update_actor; "
    )
    assert "train waits since 998.2 s (no deadline) for the call of verl" in first.text
    assert "train: held by train since 998.2 s" in first.text
    assert "  train is RUNNING since 998.2 s: step 3" in first.text


def test_a_pool_that_is_never_given_back() -> None:
    class Thief(SimTrainer):
        """Takes the lease of the training devices as step 2 begins to be trained, and keeps it."""

        flow: AsyncTrainingFlow

        async def compute_advantages(self, batch: StepBatch) -> StepBatch:
            if batch.step == 2:
                assert self.flow.pools is not None
                await self.flow.pools.get("train").acquire("a custom stage")
            return await super().compute_advantages(batch)

    trainer = Thief(max_lag=0)
    first = expired(trainer, lambda flow: setattr(trainer, "flow", flow))[0]
    assert first.cause.startswith("a custom stage holds up train, waiting for a lease on pool train; ")
    assert "for a lease on pool train -> a custom stage" in first.text


def test_a_channel_that_is_never_emptied() -> None:
    class Blocked(SimTrainer):
        async def assemble(self, step: int, groups: Any) -> StepBatch:
            if step == 2:
                await asyncio.sleep(NEVER_S)
            return await super().assemble(step, groups)

    first = expired(Blocked(max_lag=3, groups=6, answer_s=lambda step, index: 0.1))[0]
    assert first.cause.startswith("rollout is RUNNING since ")
    assert "generate->rollout: 2 of 2" in first.text
    assert "for room in generate->rollout -> rollout" in first.text


def test_a_ring_of_waits_is_called_a_deadlock_and_spelled_out() -> None:
    async def main() -> Diagnosis:
        trainer = SimTrainer()
        flow = AsyncTrainingFlow(trainer)
        found: list[Diagnosis] = []
        waits_of().on_expiry = recorder(flow, found)
        locks = {"weights": asyncio.Lock(), "devices": asyncio.Lock()}

        async def take(owner: str, first: str, then: str, other: str) -> None:
            async with locks[first]:
                await asyncio.sleep(1)
                await within(
                    locks[then].acquire(),
                    10,
                    owner=owner,
                    what=then,
                    holder=lambda: Holders(f"{other} has it", [other]),
                )

        results = await asyncio.gather(
            take("validation", "weights", "devices", "param_update"),
            take("param_update", "devices", "weights", "validation"),
            return_exceptions=True,
        )
        assert any(isinstance(result, WaitTimeout) for result in results)
        return found[0]

    cause = run_virtual(main()).cause
    assert cause == (
        "deadlock: param_update waits for validation (waiting for weights), "
        "validation waits for param_update (waiting for devices)"
    )


def test_it_shows_the_last_events_and_what_became_of_the_groups() -> None:
    async def main() -> tuple[AsyncTrainingFlow, Diagnosis]:
        flow = AsyncTrainingFlow(SimTrainer(max_lag=1))
        await flow.run()
        return flow, diagnose(flow)

    flow, found = run_virtual(main())
    assert found.cause == "no deadlock"
    shown = found.text.partition(f"last {LAST_EVENTS} events:\n")[2].strip().splitlines()
    assert len(shown) == LAST_EVENTS
    assert "'event': 'DONE'" in shown[-1]
    assert "groups: 18 drawn, 18 trained, 0 filtered, 0 expired, 0 failed, 0 without a fate" in found.text
    assert "steps trained: 6 of 6" in found.text
    assert "train is DONE since" in found.text
    assert len(flow.log.records) > LAST_EVENTS
