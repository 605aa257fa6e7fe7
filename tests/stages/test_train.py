# SPDX-License-Identifier: Apache-2.0
"""train: the last check, the order of its duties, and the books."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Any

import pytest

from recipe.async_pipeline import AsyncTrainingFlow
from recipe.async_pipeline.core.groups.items import Group, StepBatch, Trajectory
from recipe.async_pipeline.core.stage import RoleStateMachine
from recipe.async_pipeline.core.state_machine import StageState
from recipe.async_pipeline.core.waits.clock import run_virtual
from recipe.async_pipeline.errors import CheckpointError, ConservationError, StalenessViolation
from recipe.async_pipeline.tools.ledger.audit import audit
from tests.fakes.lives import Life
from tests.fakes.trainer import ALL_ROLES, WITH_CRITIC, SimTrainer
from tests.stages.conftest import MakeRole

pytestmark = pytest.mark.virtual_time


class Books(SimTrainer):
    """Keeps the facts that each step was finished with."""

    facts: Mapping[str, float] = {}

    async def finish_step(self, batch: StepBatch, facts: Mapping[str, float]) -> None:
        self.facts = facts
        await super().finish_step(batch, facts)


def batch(step: int, *versions: tuple[int, int]) -> StepBatch:
    trajectories = tuple(
        Trajectory(key=f"t{i}", first_version=first, last_version=last, num_tokens=1)
        for i, (first, last) in enumerate(versions)
    )
    return StepBatch(step=step, groups=(Group(uid=f"g{step}", step=step, trajectories=trajectories),))


def ready(machine: RoleStateMachine, version: int) -> None:
    """Version `version` is trained and gathered; the group of the step after it was drawn."""
    machine.pipeline.versions.advance_trained(version)
    machine.pipeline.versions.advance_gathered(version)
    machine.pipeline.ledger.draw(f"g{version + 1}", version + 1, version)


async def train(machine: RoleStateMachine, item: StepBatch) -> None:
    await machine.inputs[0].send(item)
    machine.inputs[0].close()
    await machine.run()


async def test_waits_for_the_gather_of_the_step_before(alone: MakeRole) -> None:
    trainer = SimTrainer(max_lag=3, first_step=2)
    machine = alone("train", trainer)

    task = asyncio.create_task(train(machine, batch(2, (0, 0))))
    await asyncio.sleep(10)
    assert trainer.calls == [], "an update now would change weights that are still to be copied"
    assert machine.pool is not None and machine.pool.holders == ()
    ready(machine, 1)
    await task
    assert trainer.calls == ["update:2", "finish:2"]
    assert machine.pipeline.versions.trained == 2


async def test_emits_and_frees_the_devices_before_the_bookkeeping(alone: MakeRole) -> None:
    trainer = SimTrainer(costs={"update": 1.0, "finish": 50.0})
    machine = alone("train", trainer)
    ready(machine, 0)

    task = asyncio.create_task(train(machine, batch(1, (0, 0))))
    await machine.outputs[0].receive()
    assert asyncio.get_running_loop().time() == 1.0
    assert machine.pool is not None and machine.pool.holders == ()
    await asyncio.sleep(0.5)
    assert trainer.calls[-1] == "finish:1"
    assert machine.state is StageState.WAITING_OUTPUT, "it does not compute any more"
    await task
    assert asyncio.get_running_loop().time() == 51.0


def test_facts_of_a_step(alone: MakeRole) -> None:
    trainer = Books(max_lag=2, first_step=3)
    machine = alone("train", trainer)
    ready(machine, 2)
    machine.pipeline.versions.advance_served(1)
    run_virtual(train(machine, batch(3, (0, 0), (1, 2), (2, 2), (2, 2))))
    assert trainer.facts == {
        "batch/tail_s": 0.0,
        "lag/mean": 0.75,
        "lag/max": 2.0,
        "lag/mixed_version_share": 0.25,
        "lag/masked_token_share": 0.0,
        "lag/param_update": 1.0,
        "version/trainer": 3.0,
        "version/served_min": 1.0,
        "queue/untrained": 0.0,
        "queue/finished": 0.0,
        "samples/filtered": 0.0,
        "samples/expired": 0.0,
        "samples/failed": 0.0,
        "samples/regenerated": 0.0,
        "train/skipped_updates": 0.0,
    }
    fates, ledger = machine.pipeline.fates, machine.pipeline.ledger
    assert (fates.step, ledger.lag_max, ledger.trajectories_trained, fates.count("trained")) == (3, 2, 4, 1)
    trained = next(r for r in machine.pipeline.log.records if r.event == "TRAINED")
    assert trained.fields["version"] == 3
    assert trained.fields["lag/max"] == 2.0


@pytest.mark.parametrize(
    ("versions", "reason"), [((0, 2), "lag 2 exceeds max_lag 1"), ((3, 3), "does not exist yet")]
)
def test_a_trajectory_that_is_too_old_or_not_yet_possible_is_not_trained(
    alone: MakeRole, versions: tuple[int, int], reason: str
) -> None:
    trainer = SimTrainer(max_lag=1)
    machine = alone("train", trainer)
    ready(machine, 2)
    with pytest.raises(StalenessViolation, match=reason):
        run_virtual(train(machine, batch(3, (2, 2), versions)))
    assert trainer.calls == []


def test_a_prompt_that_was_never_drawn_is_caught(alone: MakeRole) -> None:
    machine = alone("train", SimTrainer())
    machine.pipeline.versions.advance_gathered(0)
    with pytest.raises(ConservationError, match="never drawn"):
        run_virtual(train(machine, batch(1, (0, 0))))


# Checkpoints.


def saving(**costs: float) -> SimTrainer:
    return SimTrainer(max_lag=3, save_every=1, steps=9, costs={"save": 5.0, **costs})


def times(flow: AsyncTrainingFlow, event: str, step: int) -> list[float]:
    """Return when something happened on the train lane to a step."""
    return [
        record.t
        for record in flow.log.records
        if (record.role, record.event, record.fields.get("step")) == ("train", event, step)
    ]


def test_devices_are_held_while_models_are_read_only() -> None:
    trainer = saving(save_samples=20.0, publish_checkpoint=100.0)
    flow = Life(trainer).flow
    (trained,) = times(flow, "TRAINED", 1)
    _, lease = times(flow, "LEASE", 1)
    _, release = times(flow, "RELEASE", 1)
    (saved,) = times(flow, "SAVED", 1)
    assert trained <= lease and release == lease + 5.0, "the samples are read without devices"
    (following,) = times(flow, "TRAINED", 2)
    assert release + 20.0 < following < saved, "the next step is trained while it is completed"
    assert saved == release + 120.0


def test_checkpoints_are_completed_one_after_the_other_and_before_the_stage_ends() -> None:
    trainer = saving(publish_checkpoint=100.0)
    Life(trainer)
    calls = [call for call in trainer.calls if call.startswith(("save:", "publish_checkpoint:"))]
    assert calls == [f"{what}:{step}" for step in range(1, 10) for what in ("save", "publish_checkpoint")]
    assert [one.flow.step for one in trainer.checkpoints] == list(range(1, 10))


def test_a_checkpoint_that_takes_longer_than_any_wait_ends_no_run() -> None:
    trainer = saving(save=5000.0, save_samples=3000.0, publish_checkpoint=9000.0)
    trainer.wait_timeout_s = 100.0
    life = Life(trainer)
    assert life.flow.result().steps == 9
    assert [one.flow.step for one in trainer.checkpoints] == list(range(1, 10))


@pytest.mark.parametrize("moment", ["save", "save_samples", "publish_checkpoint"])
async def test_a_checkpoint_that_fails_ends_the_run_at_once_with_its_error(moment: str) -> None:
    trainer = saving(update=500.0)
    trainer.fail, trainer.wait_timeout_s = {moment: OSError("disk failed")}, None
    flow = AsyncTrainingFlow(trainer)

    with pytest.raises(OSError, match="disk failed"):
        await flow.run()
    assert flow.clock.now() < 1500, "the third step had not ended"
    assert [role for role, _ in flow.failures] == ["train"]
    assert [one.flow.step for one in trainer.checkpoints] == [1]


@pytest.mark.parametrize("roles", [ALL_ROLES, WITH_CRITIC])
def test_a_moment_of_a_full_disk_costs_one_checkpoint(roles: tuple[str, ...]) -> None:
    trainer = SimTrainer(
        max_lag=3,
        save_every=10,
        steps=40,
        roles=roles,
        disk_is_full=lambda now: now < 150.0,
        costs={"update": 10.0},
    )
    flow = Life(trainer).flow
    saved = [one.flow.step for one in trainer.checkpoints]
    assert saved[-1] == 40 and saved[0] % 10, "not at its next time"
    assert flow.checkpoints.last == 40
    assert flow.checkpoints.failures > 0
    ages = {
        int(record.fields["version"]): record.fields["checkpoint/age_steps"]
        for record in flow.log.records
        if record.event == "TRAINED"
    }
    assert ages[10] == 10 and ages[saved[0]] == saved[0] and ages[39] < 10


def test_a_disk_that_stays_full_ends_the_run() -> None:
    trainer = SimTrainer(save_every=2, steps=300, disk_is_full=lambda now: True, costs={"update": 10.0})
    with pytest.raises(
        CheckpointError, match=r"last \d+ checkpoints could not be written, because the disk is"
    ):
        Life(trainer)


class Diverged(SimTrainer):
    """The gradients of its second and third step are not finite."""

    async def update(self, batch: StepBatch) -> StepBatch:
        done = await super().update(batch)
        norm = {2: math.nan, 3: math.inf}.get(batch.step, 1.5)
        return done.with_results(metrics={"actor/grad_norm": norm})


def test_a_step_whose_update_was_skipped_is_counted_and_in_the_ledger() -> None:
    records: list[dict[str, Any]] = []
    flow = AsyncTrainingFlow(Diverged(steps=4))
    flow.ledger.subscribe(lambda record: records.append(record.as_dict()))
    run_virtual(flow.run())
    skipped = {record["step"]: record.get("skipped") for record in records if record["kind"] == "trained"}
    assert skipped == {1: None, 2: "actor/grad_norm is nan", 3: "actor/grad_norm is inf", 4: None}
    trained = [one.fields["train/skipped_updates"] for one in flow.log.records if one.event == "TRAINED"]
    assert trained == [0.0, 1.0, 2.0, 2.0]
    assert flow.result().updates_skipped == 2
    assert flow.state(4).ledger.skipped == 2


class CriticDiverged(Diverged, Books):
    """The gradients of the critic are not finite in its third and fourth step."""

    async def update_critic(self, batch: StepBatch) -> StepBatch:
        done = await super().update_critic(batch)
        return done.with_results(metrics={"critic/grad_norm": math.nan if batch.step > 2 else 1.5})


@pytest.mark.parametrize("pool", ["train", "critic"])
def test_a_step_whose_critic_was_not_updated_is_counted_once(pool: str) -> None:
    records: list[dict[str, Any]] = []
    trainer = CriticDiverged(steps=4, roles=WITH_CRITIC, places={"critic": pool})
    flow = AsyncTrainingFlow(trainer)
    flow.ledger.subscribe(lambda record: records.append(record.as_dict()))
    run_virtual(flow.run())
    (skipped,) = (record for record in records if record["kind"] == "skipped")
    assert (skipped["step"], skipped["why"]) == (4, "critic/grad_norm is nan")
    assert trainer.facts["train/skipped_updates"] == flow.result().updates_skipped == 3
    assert not audit(records).violations
