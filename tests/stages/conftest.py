# SPDX-License-Identifier: Apache-2.0
"""One role on its own: real channels and pool, a simulated trainer, no other roles."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from recipe.async_pipeline import AsyncTrainingFlow, RoleStateMachine, create_role_state_machine
from recipe.async_pipeline.core.channel import Channel
from recipe.async_pipeline.core.groups.items import Prompt
from recipe.async_pipeline.core.pools import DevicePool
from tests.fakes.trainer import SimTrainer

MakeRole = Callable[..., RoleStateMachine]


async def admit(machine: RoleStateMachine, *uids: str) -> None:
    """Let groups into the message queue, as the dataloader does; the starting weights are served."""
    pipeline, left = machine.pipeline, list(uids)
    pipeline.versions.advance_gathered(max(pipeline.schedule.first_step - 1, pipeline.versions.gathered))
    pipeline.versions.advance_served(max(pipeline.schedule.first_step - 1, pipeline.versions.served))
    while left:
        admission = await pipeline.queue.next_admission()
        for uid in left[: admission.prompts]:
            pipeline.ledger.draw(uid, admission.step, admission.version)
            pipeline.queue.enter(Prompt(uid=uid, step=admission.step), admission.version)
        left = left[admission.prompts :]


@pytest.fixture
def alone() -> MakeRole:
    """Makes a machine of a role, between a channel `in` and a channel `out` of `room` items."""

    def make(role: str, trainer: SimTrainer, *, lane: int = 0, room: int = 64) -> RoleStateMachine:
        machine = create_role_state_machine(role, AsyncTrainingFlow(trainer), trainer, lane=lane)
        machine.inputs, machine.outputs = (Channel("in", 64),), (Channel("out", room),)
        pool = trainer.pool_of(role)
        machine.pool = None if pool is None else DevicePool(pool, 1)
        machine.pipeline.machines.append(machine)
        return machine

    return make
