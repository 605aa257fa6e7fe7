# SPDX-License-Identifier: Apache-2.0
"""Bounds by hand, and where they are reached. That nothing beats them is in test_simulation.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from recipe.async_pipeline.tools.plan.bound import (
    bound_s,
    bound_terms,
    concave_rate,
    estimate_s,
    generate_s,
    work_of,
)
from recipe.async_pipeline.tools.plan.distribution import Lognormal
from recipe.async_pipeline.tools.plan.profile import Answers, Batch, Decode, Stage, Stages, Sync
from recipe.async_pipeline.tools.plan.search import synchronous
from recipe.async_pipeline.tools.plan.simulated.simulation import simulate
from tests.tools.plan.workloads import profile, random_profile, setting


def test_work_is_that_of_the_answers_that_are_drawn() -> None:
    of = profile(
        answers=Answers(tokens=10.0, prompt_tokens=5.0, turns=2.0, observation_tokens=3.0),
        decode=Decode(token_s=(0.1,), prefill_token_s=0.01),
    )
    work = work_of(of, 4, 3, 1)
    assert work.written_tokens == 4 * 2 * 10
    assert work.trained_tokens == 4 * 2 * (10 + 5 + 3)
    assert work.read_s == pytest.approx(4 * 2 * 8 * 0.01)
    assert work.tail_s == work.group_s == pytest.approx(1.0 + 0.08)


def test_the_tail_is_longer_than_an_average_group() -> None:
    work = work_of(random_profile(1), 8, 20, 1)
    assert work.tail_s > 1.2 * work.group_s


def test_an_engines_rate_is_made_concave_from_above() -> None:
    decode = Decode(concurrency=(1, 4, 8), token_s=(1.0, 4.0, 4.0), slots=8)
    corners, rates = concave_rate(decode)
    for c in range(1, 9):
        assert np.interp(c, corners, rates) >= c / decode.step_s(c) - 1e-12
    assert (np.diff(np.diff(rates) / np.diff(corners)) <= 1e-12).all()
    assert rates[-1] == 2.0


def test_terms_by_hand() -> None:
    of = profile(
        stages=Stages(update=Stage(fixed_s=0.5), logp=Stage(fixed_s=0.2), gather=Stage(fixed_s=0.1)),
        sync=Sync(transfer_s=0.05, load_s=0.15, commit_s=0.1, loads_at_once=1),
    )
    terms = bound_terms(setting(of, "n_step_ahead", max_lag=3, depth=1))
    assert terms["train"] == pytest.approx(0.8)
    assert terms["loop"] == pytest.approx((1.0 + 0.5 + 0.1 + 0.3) / 4)
    assert terms["littles"] == pytest.approx((1.0 + 0.5 + 0.1 + 0.3) / 2)
    # 80 tokens on two engines of at most 8 answers (all that are in flight) a tenth of a second each.
    assert terms["generate"] == pytest.approx(0.5, rel=1e-6)


def test_stalls_reduce_the_time_for_decoding() -> None:
    one = setting(profile(decode=Decode(token_s=(0.1,), slots=4)), generate=1)
    work = work_of(one.profile, 4, 4, 1)
    assert generate_s(one, work, 1, 0.0) == pytest.approx(2.0, rel=1e-6)
    assert generate_s(one, work, 1, 0.7) == pytest.approx(2.7, rel=1e-6)


def test_separate_pools_have_separate_bounds() -> None:
    from recipe.async_pipeline.config.placement import Placement, Pool

    of = profile(
        stages=Stages(update=Stage(fixed_s=0.6), logp=Stage(fixed_s=0.2), ref_logp=Stage(fixed_s=0.5)),
        sync=Sync(pull_s=0.1),
    )
    pools = (
        Pool("train", ("train",), (1,)),
        Pool("logp", ("logp",), (1,)),
        Pool("ref", ("ref_logp",), (1,)),
        Pool("generate", ("generate",), (2,)),
    )
    terms = bound_terms(replace(setting(of, "n_step_ahead"), placement=Placement(pools)))
    assert (terms["train"], terms["logp"], terms["ref"]) == pytest.approx((0.6, 0.3, 0.5))


def test_shared_devices_do_both_in_turn() -> None:
    sync = synchronous(setting(profile(sync=Sync(load_s=0.1, switch_s=0.2)), generate=1))
    assert bound_s(sync) == pytest.approx(1.0 + 0.5 + 0.2)
    assert simulate(sync).step_s == pytest.approx(bound_s(sync) + 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_an_estimate_is_above_the_bound_and_close_to_the_simulation(seed: int) -> None:
    of = profile(
        batch=Batch(groups=16, answers=4),
        answers=Answers(tokens=Lognormal(median=100, sigma=1.0, cap=1600)),
        decode=Decode(concurrency=(1, 64), token_s=(0.02, 0.02 + 0.01 * seed), slots=256),
        stages=Stages(update=Stage(fixed_s=1.0 + seed)),
    )
    run = setting(of, "fully_async", max_lag=1 + seed % 4, generate=4, steps=40)
    assert bound_s(run) <= estimate_s(run) * (1 + 1e-9)
    assert estimate_s(run) == pytest.approx(simulate(run).step_s, rel=0.35)
