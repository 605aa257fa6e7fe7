# SPDX-License-Identifier: Apache-2.0
"""Plans find what is best, and say so when that is to stay synchronous."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from recipe.async_pipeline.errors import ConfigError
from recipe.async_pipeline.sim.layout import groups_of, knobs_of, placement_of, pools_of
from recipe.async_pipeline.sim.profile import Profile, Stage, Stages
from recipe.async_pipeline.sim.search import Plan, _candidates, judge, overrides, plan, synchronous
from recipe.async_pipeline.sim.simulation import simulate
from recipe.async_pipeline.sim.trainer import Setting
from tests.sim.workloads import LONG_TAIL, TRAINING


@pytest.fixture(scope="module")
def long_tail() -> Plan:
    return plan(LONG_TAIL, 16, max_lag=4)


def generating(of: Profile) -> float:
    placement = placement_of(of, pools_of({("train", "logp"): 8}, 8), 16)
    sync = simulate(
        synchronous(
            Setting(
                profile=of,
                placement=placement,
                knobs=knobs_of("on_policy"),
                groups=groups_of(of, placement),
                steps=12,
            )
        )
    )
    shares = sync.accounting.pools["all"].shares()
    return sum(
        share for reason, share in shares.items() if reason in ("compute_generate", "wait_environment")
    )


@pytest.mark.slow
def test_a_long_tail_pays(long_tail: Plan) -> None:
    assert long_tail.verdict == "async"
    best = long_tail.found[0]
    assert best.interval[0] > 1.5
    assert best.interval[0] <= best.speedup <= best.interval[1]
    assert max(o.lag_max for o in best.outcomes) <= best.candidate.setting.knobs.max_lag <= 4
    assert "the best synchronous layout" in long_tail.why


@pytest.mark.slow
def test_training_alone_does_not_pay_and_is_right_about_it() -> None:
    assert 0.05 < generating(TRAINING) < 0.15
    found = plan(TRAINING, 16)
    assert found.verdict == "sync"
    assert "asynchrony will not pay" in found.why
    assert found.found[0].speedup < 1.05


@pytest.mark.slow
def test_more_lag_is_advised_only_to_those_who_allowed_none() -> None:
    """The best layout may have no lag though some was allowed."""
    best = plan(TRAINING, 16, max_lag=0).found[0]
    assert judge(best, 0)[1].endswith("allow some lag")
    assert "allow some lag" not in judge(best, 4)[1]
    assert "of a synchronous step" in judge(best, 4)[1]


def test_nothing_that_was_not_simulated_is_better(long_tail: Plan) -> None:
    """A sample of all candidates, simulated after all."""
    best = long_tail.found[0]
    reached = best.candidate.per_group(best.step_s)
    for candidate in list(_candidates(LONG_TAIL, 16, 4, 1))[::9]:
        assert candidate.per_group(simulate(candidate.setting).step_s) > 0.93 * reached, candidate


def test_no_more_lag_than_allowed() -> None:
    assert {c.setting.knobs.max_lag for c in _candidates(LONG_TAIL, 16, 1, 1)} == {0, 1}


def test_pools_apart_are_tried_where_there_is_somebody_to_put_there() -> None:
    of = msgspec.structs.replace(
        LONG_TAIL,
        stages=Stages(
            update=Stage(token_s=1e-3),
            logp=Stage(token_s=2e-4),
            ref_logp=Stage(token_s=2e-4),
            values=Stage(),
            critic=Stage(token_s=1e-3),
        ),
    )
    found = {c.shape for c in _candidates(of, 32, 1, 1)}
    assert found == {
        "together",
        "reference apart",
        "log-probs apart",
        "four pools",
        "critic apart",
        "critic and reference apart",
    }


def test_layouts_obey_nodes_replicas_and_batches() -> None:
    of = msgspec.structs.replace(LONG_TAIL, devices_per_replica=4)
    for candidate in _candidates(of, 32, 1, 1):
        setting = candidate.setting
        assert setting.placement.devices <= 32
        assert setting.devices_of("generate") % 4 == 0
        assert setting.groups * 8 % setting.devices_of("train") == 0


def test_devices_that_fit_nothing_are_an_error() -> None:
    of = msgspec.structs.replace(LONG_TAIL, devices_per_replica=8)
    with pytest.raises(
        ConfigError, match=r"--devices 4: no split into training and whole replicas of 8 devices"
    ):
        plan(of, 4)


def test_overrides_say_all_that_the_plan_means(long_tail: Plan) -> None:
    found = long_tail.found[0]
    lines = overrides(replace(found))
    assert "+async_pipeline=True" in lines
    assert any(
        line.startswith("++trainer.v1.async_pipeline.pools={train:{roles:[train,logp],devices:")
        for line in lines
    )
    assert f"data.train_batch_size={found.candidate.setting.groups}" in lines
