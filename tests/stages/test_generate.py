# SPDX-License-Identifier: Apache-2.0
"""generate: each group leaves the moment it is finished; a failure leaves no task behind."""

from __future__ import annotations

import asyncio

import pytest

from recipe.async_pipeline.core.clock import run_virtual
from recipe.async_pipeline.core.items import Group, Prompt, PromptBatch
from recipe.async_pipeline.core.recall import Recall
from recipe.async_pipeline.core.stage import RoleStateMachine
from recipe.async_pipeline.core.state_machine import StageState
from recipe.async_pipeline.errors import RolloutError, StageProtocolError, WaitTimeout
from tests.fakes.trainer import SimTrainer
from tests.stages.conftest import MakeRole, admit


def prompts(count: int) -> PromptBatch:
    made = tuple(Prompt(uid=f"p{i}", step=1, payload=i) for i in range(count))
    return PromptBatch(step=1, prompts=made, admitted_version=0)


async def send(machine: RoleStateMachine, count: int) -> None:
    await admit(machine, *(f"p{i}" for i in range(count)))
    await machine.inputs[0].send(prompts(count))


def test_groups_of_later_prompts_do_not_wait_for_a_slow_one(alone: MakeRole) -> None:
    trainer = SimTrainer(answer_s=lambda step, index: 100.0 if index == 0 else 1.0)
    machine = alone("generate", trainer)

    async def main() -> list[tuple[str, float]]:
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
        return arrivals

    assert run_virtual(main()) == [("p1", 30.0), ("p2", 30.0), ("p0", 100.0)], "p1 and p2 wait in `out`"
    assert machine.lanes(machine.pipeline) == 1


def test_hands_on_each_group_the_moment_it_is_finished(alone: MakeRole) -> None:
    seconds = [5.0, 1.0, 3.0]
    machine = alone("generate", SimTrainer(answer_s=lambda step, index: seconds[index]))
    arrivals: list[tuple[str, float]] = []

    async def collect() -> None:
        async for group in machine.outputs[0]:
            arrivals.append((group.uid, asyncio.get_running_loop().time()))

    async def main() -> None:
        await send(machine, 3)
        machine.inputs[0].close()
        await asyncio.gather(machine.run(), collect())

    run_virtual(main())
    assert arrivals == [("p1", 1.0), ("p2", 3.0), ("p0", 5.0)]


def test_a_slow_consumer_does_not_hold_back_the_servers(alone: MakeRole) -> None:
    trainer = SimTrainer(answer_s=lambda step, index: 1.0 + index)
    machine = alone("generate", trainer, room=1)

    async def main() -> list[str]:
        await send(machine, 3)
        machine.inputs[0].close()
        task = asyncio.create_task(machine.run())
        await asyncio.sleep(10)
        assert trainer.in_flight == 0, "all are answered"
        assert machine.state is StageState.WAITING_OUTPUT
        uids = [group.uid async for group in machine.outputs[0]]
        await task
        return uids

    assert run_virtual(main()) == ["p0", "p1", "p2"]


class Watched(SimTrainer):
    """p0 fails after two seconds."""

    def __init__(self) -> None:
        super().__init__(answer_s=lambda step, index: 1.0 if index == 1 else 100.0, groups=4)

    async def answer(self, prompt: Prompt) -> Group:
        if prompt.payload == 0:
            await asyncio.sleep(2)
            raise RolloutError("p0 broke")
        return await super().answer(prompt)


def test_a_failure_cancels_the_siblings_and_waits_for_them(alone: MakeRole) -> None:
    trainer = Watched()
    machine = alone("generate", trainer)

    async def main() -> set[asyncio.Task[object]]:
        await send(machine, 4)
        with pytest.raises(RolloutError, match="p0 broke"):
            await machine.run()
        return asyncio.all_tasks() - {asyncio.current_task()}  # type: ignore[arg-type]

    assert run_virtual(main()) == set(), "no task is left behind"
    assert trainer.cancelled == ["p2", "p3"]
    assert machine.outputs[0].depth_max == 1, "p1 had been handed on"
    assert machine.pool is not None and machine.pool.holders == ()


def test_an_answer_that_never_comes_is_counted(alone: MakeRole) -> None:
    machine = alone("generate", SimTrainer(answer_s=lambda step, index: 1.0 if index == 0 else 1e6))

    async def main() -> None:
        await send(machine, 3)
        await machine.run()

    with pytest.raises(
        WaitTimeout,
        match=r"a group to be answered; 2 groups are being answered or scored, the oldest since 1001\.0 s "
        r"\(step 1 key p1\)",
    ):
        run_virtual(main())


def test_the_log_names_group_and_version(alone: MakeRole) -> None:
    trainer = SimTrainer()
    trainer.served = 7
    machine = alone("generate", trainer)

    async def main() -> None:
        await send(machine, 1)
        machine.inputs[0].close()
        await machine.run()

    run_virtual(main())
    output = next(r for r in machine.pipeline.log.records if r.event == "OUTPUT")
    assert dict(output.fields) == {"step": 1, "key": "p0", "version": 7}


# Recalled by the message queue.


@pytest.mark.parametrize("straggler", ["drop", "regenerate"])
def test_a_group_that_holds_a_step_up_is_given_up_or_answered_again(alone: MakeRole, straggler: str) -> None:
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

    async def main() -> None:
        await send(machine, 2)
        machine.inputs[0].close()
        await asyncio.gather(machine.run(), collect())

    run_virtual(main())
    ledger = machine.pipeline.ledger
    assert trainer.cancelled == ["p0"]
    assert machine.pipeline.fates.count("expired") == (straggler == "drop")
    assert ledger.regenerated == (straggler == "regenerate")
    assert arrived == [("p1", 1.0, 0), *([("p0", 3.0, 1)] if straggler == "regenerate" else [])]
    recalled = [r.fields["fate"] for r in machine.pipeline.log.records if r.event == "RECALLED"]
    assert recalled == [straggler]


def test_a_group_that_was_recalled_as_it_finished_is_discarded(alone: MakeRole) -> None:
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

    async def main() -> None:
        await admit(machine, "p0", "p1")
        await machine.inputs[0].send(prompts(1))
        machine.inputs[0].close()
        await machine.run()

    run_virtual(main())
    assert trainer.discarded == ["p0"]
    assert machine.pipeline.fates.count("expired") == 1
    assert len(machine.outputs[0]) == 0


def test_a_group_that_comes_back_empty_was_recalled_or_is_an_error(alone: MakeRole) -> None:
    class Empty(SimTrainer):
        async def generate_group(self, prompt: Prompt, recall: Recall) -> Group | None:
            return None

    machine = alone("generate", Empty())

    async def main() -> None:
        await send(machine, 1)
        await machine.run()

    with pytest.raises(StageProtocolError, match="group p0 came back empty, but was not recalled"):
        run_virtual(main())
