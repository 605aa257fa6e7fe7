# SPDX-License-Identifier: Apache-2.0
"""The simulated trainer makes the same decisions as the real one from the same settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from recipe.async_pipeline.config.knobs.schema import TrainingConfig
from recipe.async_pipeline.config.placement import Placement, Pool
from recipe.async_pipeline.core.flow import AsyncTrainingFlow
from recipe.async_pipeline.core.groups.message_queue import MessageQueue
from recipe.async_pipeline.core.lag.staleness import Versions
from recipe.async_pipeline.core.schedule import Schedule
from recipe.async_pipeline.core.waits.clock import run_virtual
from recipe.async_pipeline.tools.plan.profile import Stage, Stages, Sync, Validation
from recipe.async_pipeline.tools.plan.simulated.trainer import Setting, SimulatedTrainer
from tests.fakes.queue_order import order_of
from tests.tools.plan.workloads import profile, setting


def apart(of: Setting) -> Setting:
    pools = (
        Pool("train", ("train",), (1,)),
        Pool("logp", ("logp",), (1,)),
        Pool("generate", ("generate",), (2,)),
    )
    return replace(of, placement=Placement(pools))


def trainer(of: Setting | None = None) -> SimulatedTrainer:
    return SimulatedTrainer(of or setting(profile(), "n_step_ahead", max_lag=2))


def test_roles_depend_on_the_profile() -> None:
    assert "ref_logp" not in trainer().roles()
    critic = profile(stages=Stages(update=Stage(), values=Stage(), critic=Stage(), ref_logp=Stage()))
    assert {"ref_logp", "values", "critic"} <= set(trainer(setting(critic)).roles())


def test_the_gather_is_on_the_training_devices_and_rollout_is_separate() -> None:
    one = trainer()
    assert one.pool_of("param_update") == one.pool_of("logp") == "train"
    assert one.pool_of("generate") == "generate"
    assert one.pool_of("reward") is None
    assert one.pools() == {"train": 1, "generate": 2}


@pytest.mark.parametrize(("strategy", "order"), [("n_step_ahead", "drawn"), ("fully_async", "finished")])
def test_the_queue_is_set_as_the_strategy_says(strategy: str, order: str) -> None:
    versions = Versions()
    queue = trainer(setting(profile(), strategy, max_lag=3, depth=2)).schedule.queue(versions)
    assert (queue.depth, queue.max_lag) == (2, 3)
    assert order_of(queue, versions) == order


def test_weight_updates_follow_sync_every_and_validation() -> None:
    of = msgspec.structs.replace(profile(), validation=Validation(every=5, seconds=1.0))
    one = trainer(setting(of, "n_step_ahead", max_lag=3, sync_every=2, steps=16))
    assert [v for v in range(1, 17) if one.schedule.publishes(v)] == [2, 4, 5, 6, 8, 10, 12, 14, 15, 16]


def test_old_log_probs_are_of_the_trainer_or_of_a_copy_a_step_older() -> None:
    ahead = setting(profile(), "n_step_ahead", max_lag=2)
    assert [trainer(ahead).schedule.old_policy(step) for step in (1, 2, 5)] == [0, 1, 4]
    assert [trainer(apart(ahead)).schedule.old_policy(step) for step in (1, 2, 5)] == [0, 0, 3]
    rollout = replace(ahead, knobs=replace(ahead.knobs, training=TrainingConfig(old_logp="rollout")))
    assert trainer(rollout).schedule.old_policy(3) is None


def test_a_reference_that_is_refreshed_is_published_and_pulled() -> None:
    of = profile(stages=Stages(update=Stage(fixed_s=0.1), ref_logp=Stage()), sync=Sync(pull_s=4.0))
    ahead = setting(of, "n_step_ahead", max_lag=5, sync_every=5)
    refreshed = replace(ahead, knobs=replace(ahead.knobs, training=TrainingConfig(ref_refresh_every=3)))
    assert [v for v in range(1, 10) if trainer(refreshed).schedule.publishes(v)] == [3, 5, 6, 9]
    flow = AsyncTrainingFlow(SimulatedTrainer(refreshed))
    run_virtual(flow.run())
    done = {r.fields["step"]: r.t for r in flow.log.records if r.event == "TRAINED"}
    assert done[7] - done[6] > 4.0 > done[6] - done[5], "step 7 has another reference than step 6"


def test_a_custom_strategy_is_simulated_as_it_runs() -> None:
    of = setting(profile(), f"{__name__}:EveryThird", max_lag=5)
    one = trainer(of).schedule
    assert isinstance(one, EveryThird)
    assert [v for v in range(1, 10) if one.publishes(v)] == [3, 6, 9]
    versions = Versions()
    queue = one.queue(versions)
    assert (queue.depth, order_of(queue, versions)) == (1, "finished")


class EveryThird(Schedule):
    order = "finished"

    def queue(self, versions: Versions) -> MessageQueue:
        queue = super().queue(versions)
        queue.depth = 1
        return queue

    def publishes(self, version: int) -> bool:
        return version % 3 == 0


def test_a_copy_of_the_policy_is_pulled_once_a_version() -> None:
    of = profile(stages=Stages(update=Stage(fixed_s=0.1), logp=Stage(fixed_s=0.5)), sync=Sync(pull_s=4.0))
    flow = AsyncTrainingFlow(SimulatedTrainer(apart(setting(of, "n_step_ahead", max_lag=2))))
    run_virtual(flow.run())
    computed = {r.fields["step"]: r.t for r in flow.log.records if r.event == "OLD_POLICY"}
    assert computed[10] - computed[9] == pytest.approx(4.5)


def test_a_publication_adds_up_its_replicas_times() -> None:
    of = profile(sync=Sync(transfer_s=0.5, load_s=0.25, commit_s=0.2, stall_s=0.125))
    flow = AsyncTrainingFlow(SimulatedTrainer(setting(of, steps=3)))
    first, *later = run_virtual(flow.run()).publications
    assert (first.transfer_s, first.load_s, first.stall_s, first.replicas) == (1.0, 0.5, 0.25, 2)
    assert first.commit_s == 0.4
    # Both replicas load after a second of writing.
    assert later[0].busy_s == pytest.approx(2 * 1.0)


def test_several_replicas_may_load_at_once() -> None:
    def served(at_once: int) -> float:
        of = profile(sync=Sync(load_s=1.0, loads_at_once=at_once))
        flow = AsyncTrainingFlow(SimulatedTrainer(setting(of, generate=5, steps=1)))
        run_virtual(flow.run())
        return next(r.t for r in flow.log.records if r.event == "SERVED")

    assert [served(n) for n in (1, 2, 9)] == pytest.approx([5.0, 3.0, 1.0])


@pytest.mark.parametrize(
    ("commit_s", "seconds"), [(None, 0.5 + 5 * 1.0), (0.5, 0.5 + 0.5 + 5 * 0.5), (0.25, 0.5 + 0.75 + 0.25)]
)
def test_replicas_prepare_at_once_and_short_commits_take_no_turns(
    commit_s: float | None, seconds: float
) -> None:
    of = profile(sync=Sync(transfer_s=0.5, load_s=1.0, commit_s=commit_s))
    flow = AsyncTrainingFlow(SimulatedTrainer(setting(of, generate=5, steps=1)))
    run_virtual(flow.run())
    assert next(r.t for r in flow.log.records if r.event == "SERVED") == pytest.approx(seconds)


def test_stage_times_vary_as_the_profile_says() -> None:
    of = profile(stages=Stages(update=Stage(fixed_s=1.0, cv=0.2)))
    flow = AsyncTrainingFlow(SimulatedTrainer(setting(of, steps=200)))
    took: list[Any] = []
    flow.log.subscribe(
        lambda r: took.append(r.t) if r.role == "train" and r.event in ("LEASE", "TRAINED") else None
    )
    run_virtual(flow.run())
    seconds = [end - begin for begin, end in zip(took[::2], took[1::2], strict=True)]
    mean = sum(seconds) / len(seconds)
    assert mean == pytest.approx(1.0, rel=0.05)
    assert (sum((s - mean) ** 2 for s in seconds) / len(seconds)) ** 0.5 == pytest.approx(0.2, rel=0.2)
