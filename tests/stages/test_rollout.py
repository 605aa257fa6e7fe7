# SPDX-License-Identifier: Apache-2.0
"""rollout: batches leave complete and in step order, and nothing is left over."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from recipe.async_pipeline.core.clock import run_virtual
from recipe.async_pipeline.core.items import Group, StepBatch, Trajectory
from recipe.async_pipeline.core.stage import RoleStateMachine
from recipe.async_pipeline.errors import ConservationError
from tests.fakes.trainer import SimTrainer
from tests.stages.conftest import MakeRole, admit


def group(uid: str, step: int, version: int = 0) -> Group:
    trajectory = Trajectory(key=uid, first_version=version, last_version=version, num_tokens=1)
    return Group(uid=uid, step=step, trajectories=(trajectory,))


async def feed(machine: RoleStateMachine, *groups: Group) -> list[StepBatch]:
    await admit(machine, *sorted(one.uid for one in groups))
    for one in groups:
        await machine.inputs[0].send(one)
    machine.inputs[0].close()
    await machine.run()
    return [item async for item in machine.outputs[0]]


def uids(batches: Sequence[StepBatch]) -> list[tuple[int, list[str]]]:
    return [(b.step, [g.uid for g in b.groups]) for b in batches]


def test_a_later_step_that_is_complete_waits_for_the_earlier(alone: MakeRole) -> None:
    machine = alone("rollout", SimTrainer(groups=2, max_lag=1))
    groups = [group("c", 2), group("a", 1), group("d", 2), group("b", 1)]
    assert uids(run_virtual(feed(machine, *groups))) == [(1, ["a", "b"]), (2, ["c", "d"])]


def test_a_resumed_run_starts_at_its_first_step(alone: MakeRole) -> None:
    trainer = SimTrainer(groups=1, first_step=5)
    one = group("a", 5, version=4)
    assert uids(run_virtual(feed(alone("rollout", trainer), one))) == [(5, ["a"])]


def test_a_strategy_may_take_groups_as_they_come(alone: MakeRole) -> None:
    machine = alone("rollout", SimTrainer(groups=2, max_lag=1, order="finished"))
    groups = [group("c", 2), group("a", 1), group("b", 1), group("d", 2)]
    assert uids(run_virtual(feed(machine, *groups))) == [(1, ["a", "c"]), (2, ["b", "d"])]


def test_a_group_that_teaches_nothing_is_filtered(alone: MakeRole) -> None:
    trainer = SimTrainer(groups=1, max_lag=1, filtered=lambda uid: uid == "a")
    machine = alone("rollout", trainer)
    assert uids(run_virtual(feed(machine, group("a", 1), group("b", 2)))) == [(1, ["b"])]
    assert machine.pipeline.fates.count("filtered") == 1
    assert trainer.discarded == ["a"]


def test_a_postponed_group_that_wrote_nothing_since_expires(alone: MakeRole) -> None:
    trainer = SimTrainer(groups=1, max_lag=1, straggler="mask")
    machine = alone("rollout", trainer)

    async def main() -> list[StepBatch]:
        await admit(machine, "a", "b")
        machine.pipeline.queue.watch("a")
        versions = machine.pipeline.versions
        versions.advance_trained(1)
        versions.advance_gathered(1)
        versions.advance_served(1)
        await machine.inputs[0].send(group("b", 1))
        await machine.inputs[0].send(group("a", 1))
        machine.inputs[0].close()
        await machine.run()
        return [item async for item in machine.outputs[0]]

    assert uids(run_virtual(main())) == [(1, ["b"])]
    assert machine.pipeline.fates.count("expired") == 1
    assert trainer.discarded == ["a"]


def test_finished_groups_that_no_step_took_are_an_error(alone: MakeRole) -> None:
    machine = alone("rollout", SimTrainer(groups=2, max_lag=1))
    with pytest.raises(ConservationError, match="data ended with 2 groups that no step took"):
        run_virtual(feed(machine, group("a", 1), group("b", 1), group("c", 2)))
    assert not machine.outputs[0].closed


def test_no_data_at_all_is_a_clean_end(alone: MakeRole) -> None:
    assert run_virtual(feed(alone("rollout", SimTrainer()))) == []
