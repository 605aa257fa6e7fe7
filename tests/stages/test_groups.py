# SPDX-License-Identifier: Apache-2.0
"""Groups leave the moment they are finished, batches complete and in step order, and nothing is left over."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from recipe.async_pipeline.core.groups.items import (
    Admission,
    Group,
    Prompt,
    PromptBatch,
    StepBatch,
    Trajectory,
)
from recipe.async_pipeline.core.groups.recall import Recall
from recipe.async_pipeline.core.stage import RoleStateMachine
from recipe.async_pipeline.core.state_machine import StageState
from recipe.async_pipeline.core.waits.clock import run_virtual
from recipe.async_pipeline.errors import ConservationError, RolloutError, StageProtocolError, WaitTimeout
from tests.fakes.trainer import SimTrainer
from tests.stages.conftest import MakeRole, admit

pytestmark = pytest.mark.virtual_time

# dataloader


async def test_draws_the_steps_in_order_and_ends_after_the_last(alone: MakeRole) -> None:
    machine = alone("dataloader", SimTrainer(steps=4, max_lag=4))
    machine.pipeline.versions.advance_gathered(0)
    machine.pipeline.versions.advance_served(0)

    task = asyncio.create_task(machine.run())
    batches = [await machine.outputs[0].receive() for _ in range(4)]
    for step, batch in enumerate(batches, start=1):
        for prompt in batch.prompts:
            trajectory = Trajectory(key=prompt.uid, first_version=0, last_version=0, num_tokens=1)
            machine.pipeline.queue.put(Group(uid=prompt.uid, step=step, trajectories=(trajectory,)))
        assert machine.pipeline.queue.take(step)
    await task
    assert [b.step for b in batches] == [1, 2, 3, 4]
    assert [b.admitted_version for b in batches] == [0, 0, 0, 0]
    assert machine.state is StageState.DONE
    assert machine.pipeline.fates.drawn == 12


async def test_waits_until_weights_that_are_new_enough_are_served(alone: MakeRole) -> None:
    trainer = SimTrainer(steps=4, max_lag=1)
    machine = alone("dataloader", trainer)
    versions = machine.pipeline.versions

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


def test_dataloader_says_what_it_waits_for(alone: MakeRole) -> None:
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


# generate


def prompts(count: int) -> PromptBatch:
    made = tuple(Prompt(uid=f"p{i}", step=1, payload=i) for i in range(count))
    return PromptBatch(step=1, prompts=made, admitted_version=0)


async def send(machine: RoleStateMachine, count: int) -> None:
    await admit(machine, *(f"p{i}" for i in range(count)))
    await machine.inputs[0].send(prompts(count))


async def test_groups_of_later_prompts_do_not_wait_for_a_slow_one(alone: MakeRole) -> None:
    trainer = SimTrainer(answer_s=lambda step, index: 100.0 if index == 0 else 1.0)
    machine = alone("generate", trainer)

    await admit(machine, *(f"p{i}" for i in range(3)))
    running = asyncio.create_task(machine.run())
    arrivals = []
    for prompt in prompts(3).prompts:
        await machine.inputs[0].send(PromptBatch(step=1, prompts=(prompt,), admitted_version=0))
        await asyncio.sleep(10)
    machine.inputs[0].close()
    async for group in machine.outputs[0]:
        arrivals.append((group.uid, asyncio.get_running_loop().time()))
    await running
    assert arrivals == [("p1", 30.0), ("p2", 30.0), ("p0", 100.0)], "p1 and p2 wait in `out`"
    assert machine.lanes(machine.pipeline) == 1


async def test_hands_on_each_group_the_moment_it_is_finished(alone: MakeRole) -> None:
    seconds = [5.0, 1.0, 3.0]
    machine = alone("generate", SimTrainer(answer_s=lambda step, index: seconds[index]))
    arrivals: list[tuple[str, float]] = []

    async def collect() -> None:
        async for group in machine.outputs[0]:
            arrivals.append((group.uid, asyncio.get_running_loop().time()))

    await send(machine, 3)
    machine.inputs[0].close()
    await asyncio.gather(machine.run(), collect())
    assert arrivals == [("p1", 1.0), ("p2", 3.0), ("p0", 5.0)]


async def test_a_slow_consumer_does_not_hold_back_the_servers(alone: MakeRole) -> None:
    trainer = SimTrainer(answer_s=lambda step, index: 1.0 + index)
    machine = alone("generate", trainer, room=1)

    await send(machine, 3)
    machine.inputs[0].close()
    task = asyncio.create_task(machine.run())
    await asyncio.sleep(10)
    assert trainer.in_flight == 0, "all are answered"
    assert machine.state is StageState.WAITING_OUTPUT
    uids = [group.uid async for group in machine.outputs[0]]
    await task
    assert uids == ["p0", "p1", "p2"]


class Watched(SimTrainer):
    """p0 fails after two seconds."""

    def __init__(self) -> None:
        super().__init__(answer_s=lambda step, index: 1.0 if index == 1 else 100.0, groups=4)

    async def answer(self, prompt: Prompt) -> Group:
        if prompt.payload == 0:
            await asyncio.sleep(2)
            raise RolloutError("p0 broke")
        return await super().answer(prompt)


async def test_a_failure_cancels_the_siblings_and_waits_for_them(alone: MakeRole) -> None:
    trainer = Watched()
    machine = alone("generate", trainer)

    await send(machine, 4)
    with pytest.raises(RolloutError, match="p0 broke"):
        await machine.run()
    assert (asyncio.all_tasks() - {asyncio.current_task()}) == set(), "no task is left behind"
    assert trainer.cancelled == ["p2", "p3"]
    assert len(machine.outputs[0]) == 1, "p1 had been handed on"
    assert machine.pool is not None and machine.pool.holders == ()


async def test_an_answer_that_never_comes_is_counted(alone: MakeRole) -> None:
    machine = alone("generate", SimTrainer(answer_s=lambda step, index: 1.0 if index == 0 else 1e6))

    with pytest.raises(
        WaitTimeout,
        match=r"a group to be answered; 2 groups are being answered or scored, the oldest since 1001\.0 s "
        r"\(step 1 key p1\)",
    ):
        await send(machine, 3)
        await machine.run()


async def test_the_log_names_group_and_version(alone: MakeRole) -> None:
    trainer = SimTrainer()
    trainer.served = 7
    machine = alone("generate", trainer)

    await send(machine, 1)
    machine.inputs[0].close()
    await machine.run()
    output = next(r for r in machine.pipeline.log.records if r.event == "OUTPUT")
    assert dict(output.fields) == {"step": 1, "key": "p0", "version": 7}


# Recalled by the message queue.


@pytest.mark.parametrize("straggler", ["drop", "regenerate"])
async def test_a_group_that_holds_a_step_up_is_given_up_or_answered_again(
    alone: MakeRole, straggler: str
) -> None:
    seconds = iter([50.0, 1.0, 2.0, 3.0])
    trainer = SimTrainer(max_lag=1, groups=1, straggler=straggler, answer_s=lambda step, index: next(seconds))
    trainer.served = 0
    machine = alone("generate", trainer)
    queue = machine.pipeline.queue
    arrived: list[tuple[str, float, int]] = []

    async def collect() -> None:
        async for group in machine.outputs[0]:
            queue.put(group)
            queue.take(1 if len(arrived) == 0 else 2)
            arrived.append((group.uid, asyncio.get_running_loop().time(), group.recalls))

    await send(machine, 2)
    machine.inputs[0].close()
    await asyncio.gather(machine.run(), collect())
    ledger = machine.pipeline.ledger
    assert trainer.cancelled == ["p0"]
    assert machine.pipeline.fates.count("expired") == (straggler == "drop")
    assert ledger.regenerated == (straggler == "regenerate")
    assert arrived == [("p1", 1.0, 0), *([("p0", 3.0, 1)] if straggler == "regenerate" else [])]
    recalled = [r.fields["fate"] for r in machine.pipeline.log.records if r.event == "RECALLED"]
    assert recalled == [straggler]


async def test_a_group_that_was_recalled_as_it_finished_is_discarded(alone: MakeRole) -> None:
    class AtTheSameMoment(SimTrainer):
        async def generate_group(self, prompt: Prompt, recall: Recall) -> Group | None:
            group, other = [await self.answer(p) for p in prompts(2).prompts]
            queue.put(other)
            queue.take(1)
            return group

    trainer = AtTheSameMoment(max_lag=1, groups=1, straggler="drop")
    trainer.served = 0
    machine = alone("generate", trainer)
    queue = machine.pipeline.queue

    await admit(machine, "p0", "p1")
    await machine.inputs[0].send(prompts(1))
    machine.inputs[0].close()
    await machine.run()
    assert trainer.discarded == ["p0"]
    assert machine.pipeline.fates.count("expired") == 1
    assert len(machine.outputs[0]) == 0


async def test_a_group_that_comes_back_empty_was_recalled_or_is_an_error(alone: MakeRole) -> None:
    class Empty(SimTrainer):
        async def generate_group(self, prompt: Prompt, recall: Recall) -> Group | None:
            return None

    machine = alone("generate", Empty())

    with pytest.raises(StageProtocolError, match="group p0 came back empty, but was not recalled"):
        await send(machine, 1)
        await machine.run()


# rollout


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


async def test_a_postponed_group_that_wrote_nothing_since_expires(alone: MakeRole) -> None:
    trainer = SimTrainer(groups=1, max_lag=1, straggler="mask")
    machine = alone("rollout", trainer)

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
    assert uids([item async for item in machine.outputs[0]]) == [(1, ["b"])]
    assert machine.pipeline.fates.count("expired") == 1
    assert trainer.discarded == ["a"]


def test_finished_groups_that_no_step_took_are_an_error(alone: MakeRole) -> None:
    machine = alone("rollout", SimTrainer(groups=2, max_lag=1))
    with pytest.raises(ConservationError, match="data ended with 2 groups that no step took"):
        run_virtual(feed(machine, group("a", 1), group("b", 1), group("c", 2)))
    assert not machine.outputs[0].closed


def test_no_data_at_all_is_a_clean_end(alone: MakeRole) -> None:
    assert run_virtual(feed(alone("rollout", SimTrainer()))) == []
