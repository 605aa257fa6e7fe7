# SPDX-License-Identifier: Apache-2.0
"""Simulated layouts obey the rules of real ones."""

from __future__ import annotations

import msgspec
import pytest

from recipe.async_pipeline.errors import ConfigError
from recipe.async_pipeline.tools.plan.layout import (
    groups_of,
    knobs_of,
    placement_of,
    pools_of,
    shapes,
    shared_placement,
    smaller,
)
from recipe.async_pipeline.tools.plan.profile import Batch, Stage, Stages
from tests.tools.plan.workloads import profile, setting

WITH_ALL = profile(stages=Stages(update=Stage(), ref_logp=Stage(), values=Stage(), critic=Stage()))
TOGETHER = ("train", "logp")


def test_pools_are_placed_as_for_a_real_run() -> None:
    placement = placement_of(profile(), pools_of({TOGETHER: 6}, 2), 8)
    assert {p.name: (p.roles, p.devices) for p in placement.pools} == {
        "train": (TOGETHER, 6),
        "generate": (("generate",), 2),
    }


@pytest.mark.parametrize(
    ("pools", "message"),
    [
        (pools_of({TOGETHER: 6}, 3), "the pools must fit into the 8 devices"),
        (pools_of({("train", "ref_logp"): 4, ("critic",): 2}, 2), "this run has no critic"),
        ({"a": {"roles": ["train"], "devices": 2}}, "must have a pool for generate"),
    ],
)
def test_impossible_pools_are_refused(pools: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        placement_of(profile(), pools, 8)


def test_replicas_are_whole() -> None:
    of = msgspec.structs.replace(profile(), devices_per_replica=4)
    with pytest.raises(ConfigError, match="whole replicas of 4 devices, got 6; the nearest sizes"):
        placement_of(of, pools_of({TOGETHER: 2}, 6), 8)


def test_a_growing_batch_is_rounded_to_divide_evenly() -> None:
    of = profile(batch=Batch(groups_per_device=1.0, answers=4))
    placement = placement_of(of, pools_of({TOGETHER: 24}, 40), 64)
    assert groups_of(of, placement) == 66, "a multiple of 6, near 64"


def test_a_batch_that_does_not_divide_evenly_is_refused() -> None:
    of = profile(batch=Batch(groups=16, answers=2))
    with pytest.raises(
        ConfigError,
        match=r"batch.groups x batch.answers of the profile, 32 samples, .* 6 devices of pool train; "
        r"change its sizes, or give the pool 4 or 8 devices",
    ):
        groups_of(of, placement_of(of, pools_of({TOGETHER: 6}, 2), 8))


def test_strategies_imply_their_lag() -> None:
    assert [
        knobs_of(name).staleness.max_lag
        for name in ("on_policy", "one-step-off", "n_step_ahead", "fully_async")
    ] == [0, 1, 3, 3]
    assert knobs_of("recipe.async_pipeline.strategies:FullyAsync").staleness.max_lag == 3
    with pytest.raises(ConfigError, match="--strategy must be one of .* or module:Class"):
        knobs_of("mine")
    with pytest.raises(ConfigError, match="names module .mine., which cannot be found"):
        knobs_of("mine:Own")
    with pytest.raises(ConfigError, match="max_lag must be 1 with strategy one_step_off, got 3"):
        knobs_of("one_step_off", 3)


def test_all_devices_have_all_roles_in_the_synchronous_layout() -> None:
    (pool,) = shared_placement(WITH_ALL, 8).pools
    assert (set(pool.roles), pool.devices) == ({"train", "logp", "ref_logp", "critic", "generate"}, 8)


def test_the_same_layout_on_a_quarter_of_the_devices() -> None:
    quarter = smaller(setting(profile(batch=Batch(groups_per_device=1.0)), train=8, generate=24))
    assert quarter is not None
    assert (quarter.devices_of("train"), quarter.replicas, quarter.groups) == (2, 6, 8)
    half = smaller(setting(profile(batch=Batch(groups_per_device=1.0)), train=2, generate=6))
    assert half is not None
    assert half.placement.devices == 4
    assert smaller(setting(profile(), train=1, generate=3)) is None


def test_shapes_depend_on_the_roles() -> None:
    assert shapes(profile()) == {"together": (("train", "logp"),), "log-probs apart": (("train",), ("logp",))}
    assert set(shapes(WITH_ALL)) >= {"together", "reference apart", "four pools", "critic apart"}
