# SPDX-License-Identifier: Apache-2.0
"""verl's stages run as of the step of their batch; several steps at once do not see each other."""

from __future__ import annotations

import asyncio
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from recipe.async_pipeline.core.groups.items import StepBatch
from tests import HANG_S
from tests.conftest import Load

pytestmark = pytest.mark.real_engine


class Trainer:
    """Stands for verl's trainer: its methods read the step, and advance the KL controller."""

    def __init__(self, coefficient: float | None = None) -> None:
        self.global_steps = 0
        self.config = None
        self.processor = None
        self.both_inside = threading.Barrier(2)
        if coefficient is not None:
            self.kl_ctrl_in_reward = SimpleNamespace(value=coefficient)

    def _balance_batch(self, meta: Any, metrics: dict[str, Any]) -> Any:
        before = self.global_steps
        self.both_inside.wait(HANG_S)
        metrics["steps"] = (before, self.global_steps)
        return meta

    def _compute_advantage(self, meta: Any, metrics: dict[str, Any]) -> Any:
        metrics["kl"] = self.kl_ctrl_in_reward.value
        self.kl_ctrl_in_reward.value += self.global_steps
        return meta


@pytest.fixture
def meta(load: Load) -> Any:
    return load("transfer_queue").KVBatchMeta(partition_id="train", keys=["a"], tags=[{}], extra_info={})


def stages_of(load: Load, module: ModuleType, trainer: Trainer) -> Any:
    calls = load("recipe.async_pipeline.verl_bridge.calls.ray_calls").BlockingCalls(60.0)
    stages = module.VerlStages(trainer, calls, "trainer")
    stages.start(trainer.global_steps)
    return stages


def test_concurrent_steps_see_their_own_step(load: Load, module: ModuleType, meta: Any) -> None:
    trainer = Trainer()
    stages = stages_of(load, module, trainer)

    async def main() -> list[Any]:
        return await asyncio.gather(*(stages.balance(step, module.own_copy(meta)) for step in (3, 4)))

    assert [metrics["steps"] for _, metrics in asyncio.run(main())] == [(3, 3), (4, 4)]
    assert trainer.global_steps == 0, "the trainer's attribute is not written"


def test_the_kl_coefficient_continues_from_step_to_step(load: Load, module: ModuleType, meta: Any) -> None:
    trainer = Trainer(coefficient=0.5)
    stages = stages_of(load, module, trainer)

    async def main() -> list[Any]:
        return [(await stages.advantages(StepBatch(step=s, groups=(), payload=meta))) for s in (1, 2, 3)]

    assert [batch.metrics["kl"] for batch in asyncio.run(main())] == [0.5, 1.5, 3.5]
    assert [stages.kl_coefficient(step) for step in (1, 2, 3)] == [1.5, 3.5, 6.5]
    assert trainer.kl_ctrl_in_reward.value == 0.5


class AdaptiveKlTrainer(Trainer):
    """Advances verl's adaptive controller by a divergence that depends on the step."""

    def __init__(self, load: Load, step: int = 0, coefficient: float = 0.5) -> None:
        super().__init__()
        self.global_steps = step
        algorithms = load("verl.trainer.ppo.core_algos")
        self.kl_ctrl_in_reward = algorithms.AdaptiveKLController(coefficient, target_kl=0.1, horizon=50)

    def _compute_advantage(self, meta: Any, metrics: dict[str, Any]) -> Any:
        metrics["kl"] = self.kl_ctrl_in_reward.value
        self.kl_ctrl_in_reward.update(current_kl=0.091 + 0.01 * self.global_steps, n_steps=16)
        return meta

    def _update_actor(self, meta: Any, metrics: dict[str, Any]) -> Any:
        return meta


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("saved", [1, 3])
def test_a_resumed_run_has_the_coefficients_of_the_undisturbed_run(
    load: Load, module: ModuleType, meta: Any, monkeypatch: pytest.MonkeyPatch, ahead: int, saved: int
) -> None:
    """Steps up to `ahead` after the saved one have passed the reward stage when the checkpoint is made."""
    monkeypatch.setattr(module, "trained_columns", lambda meta, pictures: [])

    async def coefficients(stages: Any, steps: range) -> list[float]:
        batches = [StepBatch(step=step, groups=(), payload=meta) for step in steps]
        return [float((await stages.advantages(batch)).metrics["kl"]) for batch in batches]

    async def until_saved(stages: Any) -> tuple[list[float], float]:
        before = await coefficients(stages, range(1, saved + ahead + 1))
        for step in range(1, saved + 1):
            await stages.update_actor(StepBatch(step=step, groups=(), payload=meta))
        return before[:saved], stages.kl_coefficient(saved)

    undisturbed = asyncio.run(coefficients(stages_of(load, module, AdaptiveKlTrainer(load)), range(1, 9)))
    before, stored = asyncio.run(until_saved(stages_of(load, module, AdaptiveKlTrainer(load))))
    resumed = stages_of(load, module, AdaptiveKlTrainer(load, saved, stored))
    assert before + asyncio.run(coefficients(resumed, range(saved + 1, 9))) == undisturbed
    assert len(set(undisturbed)) == 8


def test_a_run_without_kl_penalty_has_no_coefficient(load: Load, module: ModuleType) -> None:
    assert stages_of(load, module, Trainer()).kl_coefficient(1) is None


def test_a_stage_works_on_its_own_copy(module: ModuleType, meta: Any) -> None:
    copied = module.own_copy(meta)
    copied.extra_info["x"] = 1
    copied.tags[0]["y"] = 2
    copied.keys.append("b")
    assert (meta.extra_info, meta.tags, meta.keys) == ({}, [{}], ["a"])


class Tags(list[dict[str, Any]]):
    """Tags of a batch that remember which thread has read them."""

    def __init__(self) -> None:
        super().__init__([{}])
        self.read_in: set[str] = set()

    def __iter__(self) -> Any:
        self.read_in.add(threading.current_thread().name)
        return super().__iter__()


def test_a_batch_is_copied_for_a_stage_in_its_thread(load: Load, module: ModuleType, meta: Any) -> None:
    stages, tags = stages_of(load, module, Trainer()), Tags()
    payload = SimpleNamespace(partition_id="train", keys=["a"], tags=tags, extra_info={})
    seen: list[Any] = []

    def stage(meta: Any, metrics: dict[str, Any]) -> None:
        seen.append(meta)
        metrics["a"] = 1

    done = asyncio.run(stages.run(StepBatch(step=1, groups=(), payload=payload), stage, "timer"))
    assert done.metrics == {"a": 1} and seen[0].keys == ["a"] and seen[0].tags is not tags
    assert tags.read_in and threading.current_thread().name not in tags.read_in


# The KL coefficient.


class Adaptive:
    """Stands for verl's adaptive controller, which changes its value in place."""

    def __init__(self, value: float) -> None:
        self.value = value

    def update(self) -> None:
        self.value *= 2


def test_each_step_has_its_coefficient(module: ModuleType) -> None:
    control = module.KlControl(Adaptive(1.0), step=4)
    for step in (5, 6, 7):
        controller = control.before(step)
        controller.update()
        control.advanced(step, controller)
    assert [control.value_after(step) for step in (4, 5, 6, 7)] == [1.0, 2.0, 4.0, 8.0]


def test_a_repeated_stage_starts_from_the_same_state(module: ModuleType) -> None:
    control = module.KlControl(Adaptive(1.0), step=0)
    control.before(1).update()
    assert control.before(1).value == 1.0


def test_states_before_a_trained_step_are_forgotten(module: ModuleType) -> None:
    control = module.KlControl(Adaptive(1.0), step=0)
    for step in range(1, 5):
        control.advanced(step, control.before(step))
    control.forget_before(3)
    assert control.value_after(3) == 1.0
    assert control.value_after(4) == 1.0
    with pytest.raises(KeyError):
        control.value_after(2)
