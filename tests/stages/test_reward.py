# SPDX-License-Identifier: Apache-2.0
"""reward: joins what the parallel branches found, then asks for the advantages once."""

from __future__ import annotations

import pytest

from recipe.async_pipeline.core.channel import Channel
from recipe.async_pipeline.core.clock import run_virtual
from recipe.async_pipeline.core.items import StepBatch
from recipe.async_pipeline.core.stage import RoleStateMachine
from recipe.async_pipeline.errors import StageProtocolError
from tests.fakes.trainer import SimTrainer
from tests.stages.conftest import MakeRole


async def join(machine: RoleStateMachine, *batches: StepBatch) -> StepBatch:
    machine.inputs = tuple(Channel(f"in{i}", 1) for i in range(len(batches)))
    for channel, batch in zip(machine.inputs, batches, strict=True):
        await channel.send(batch)
        channel.close()
    await machine.run()
    joined: StepBatch = await machine.outputs[0].receive()
    return joined


def found(name: str, step: int = 1) -> StepBatch:
    return StepBatch(step=step, groups=(), payload=name, metrics={name: step}, timing_s={name: 1.0})


def test_joins_logp_and_ref_logp(alone: MakeRole) -> None:
    trainer = SimTrainer()
    joined = run_virtual(join(alone("reward", trainer), found("logp"), found("ref_logp")))
    assert joined.payload == "logp"
    assert dict(joined.metrics) == {"logp": 1, "ref_logp": 1}
    assert dict(joined.timing_s) == {"logp": 1.0, "ref_logp": 1.0}
    assert trainer.calls == ["advantage:1"]


def test_without_a_reference_there_is_nothing_to_join(alone: MakeRole) -> None:
    assert run_virtual(join(alone("reward", SimTrainer()), found("logp"))) == found("logp")


def test_branches_of_different_steps_are_never_joined(alone: MakeRole) -> None:
    trainer = SimTrainer()
    with pytest.raises(StageProtocolError, match="reward joined items of different steps"):
        run_virtual(join(alone("reward", trainer), found("logp", 1), found("ref_logp", 2)))
    assert trainer.calls == []
