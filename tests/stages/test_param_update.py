# SPDX-License-Identifier: Apache-2.0
"""param_update: starting weights first, versions in order, devices held for the gather alone."""

from __future__ import annotations

import asyncio

import pytest

from recipe.async_pipeline import AsyncTrainingFlow
from recipe.async_pipeline.core.groups.items import StepBatch
from recipe.async_pipeline.core.waits.clock import run_virtual
from recipe.async_pipeline.errors import WaitTimeout
from tests.fakes.trainer import SimTrainer
from tests.stages.conftest import MakeRole

pytestmark = pytest.mark.virtual_time


def test_two_arenas_make_two_lanes(alone: MakeRole) -> None:
    machine = alone("param_update", SimTrainer())
    assert machine.lanes(machine.pipeline) == 2


@pytest.mark.parametrize("first_step", [1, 5])
async def test_the_first_item_is_the_starting_weights(alone: MakeRole, first_step: int) -> None:
    trainer = SimTrainer(first_step=first_step)
    machine = alone("param_update", trainer)

    await machine.inputs[0].send(StepBatch(step=first_step, groups=()))
    machine.inputs[0].close()
    machine.pipeline.versions.advance_trained(first_step)
    await machine.run()
    start = first_step - 1
    one_after_the_other = [
        f"{what}:{v}" for v in (start, first_step) for what in ("gather", "publish", "validate")
    ]
    assert trainer.calls == one_after_the_other
    assert machine.pipeline.versions.served == first_step
    assert isinstance(machine.pipeline, AsyncTrainingFlow)
    assert [p.version for p in machine.pipeline.publications] == [start, first_step]


async def test_only_the_first_lane_brings_the_starting_weights(alone: MakeRole) -> None:
    trainer = SimTrainer()
    machine = alone("param_update", trainer, lane=1)

    machine.inputs[0].close()
    await machine.run()
    assert trainer.calls == []


async def test_a_version_is_gathered_at_once_but_published_after_the_one_before(alone: MakeRole) -> None:
    trainer = SimTrainer(costs={"gather": 1.0})
    machine = alone("param_update", trainer, lane=1)
    versions = machine.pipeline.versions

    versions.advance_trained(1)
    await machine.inputs[0].send(StepBatch(step=1, groups=()))
    machine.inputs[0].close()
    task = asyncio.create_task(machine.run())
    await asyncio.sleep(0.5)
    assert machine.pool is not None
    assert list(machine.pool.holders) == ["param_update[1]"]
    await asyncio.sleep(10)
    assert trainer.calls == ["gather:1"]
    assert list(machine.pool.holders) == [], "training continues while the version waits for its turn"
    assert versions.gathered == 1, "which is what training waits for"
    versions.advance_served(0)
    await task
    assert trainer.calls == ["gather:1", "publish:1", "validate:1"]


async def test_served_is_logged_after_the_publication_and_before_the_validation(alone: MakeRole) -> None:
    trainer = SimTrainer(costs={"validate": 5.0})
    machine = alone("param_update", trainer)

    machine.inputs[0].close()
    task = asyncio.create_task(machine.run())
    await machine.pipeline.versions.wait_for("served", 0)
    assert trainer.served == 0
    await asyncio.sleep(1)
    assert trainer.calls[-1] == "validate:0"
    await task
    notes = {
        r.event: dict(r.fields) for r in machine.pipeline.log.records if r.event in ("GATHERED", "SERVED")
    }
    assert notes == {
        "GATHERED": {"step": 0, "version": 0},
        "SERVED": {
            "step": 0,
            "version": 0,
            "gather_s": 0.1,
            "transfer_s": 0.1,
            "load_s": 0.1,
            "commit_s": 0.0,
            "stall_s": 0.1,
            "busy_s": 1e9,
            "bytes": 8,
            "replicas": 1,
            "explained_share": None,
            "unexplained": "",
        },
    }


def test_a_failed_publication_is_not_served(alone: MakeRole) -> None:
    class Broken(SimTrainer):
        async def publish(self, version: int, snapshot: object) -> object:  # type: ignore[override]
            raise OSError("no room in shared memory")

    machine = alone("param_update", Broken())
    with pytest.raises(OSError, match="no room"):
        run_virtual(machine.run())
    assert machine.pipeline.versions.served == -1


async def test_says_which_version_is_missing(alone: MakeRole) -> None:
    machine = alone("param_update", SimTrainer(), lane=1)
    machine.pipeline.versions.advance_trained(3)

    with pytest.raises(WaitTimeout, match="waited 1000 s for version 2 to be served"):
        await machine.inputs[0].send(StepBatch(step=3, groups=()))
        await machine.run()
