# SPDX-License-Identifier: Apache-2.0
"""Shares and counts become whole devices; an impossible layout is an error with the nearest possible one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from recipe.async_pipeline.config.keys.foreign_keys import pools_of_ratios, pools_of_tasks
from recipe.async_pipeline.config.placement import PLACED, Placement, place, placement_of, wishes_of
from recipe.async_pipeline.errors import ConfigError

WITH_REF = ("train", "logp", "ref_logp", "generate")


def placed(
    pools: Any, *, roles: tuple[str, ...] = WITH_REF, devices: int = 8, node: int = 8
) -> dict[str, tuple[Any, ...]]:
    made = place(wishes_of(pools), roles=roles, devices=devices, node=node)
    return {pool.name: (pool.roles, pool.per_node) for pool in made.pools}


def four(**sizes: Any) -> dict[str, Any]:
    (kind,) = sizes
    return {role: {"roles": [role], kind: size} for role, size in zip(WITH_REF, sizes[kind], strict=True)}


# Notations of a layout.


def test_equal_neighbours_share_a_pool_if_the_sum_is_one() -> None:
    assert placed(pools_of_ratios([0.5, 0.5, 0.5, 0.5])) == {
        "train": (("train", "logp", "ref_logp"), (4,)),
        "generate": (("generate",), (4,)),
    }


def test_four_quarters_are_four_pools() -> None:
    assert placed(pools_of_ratios([0.25] * 4), devices=4) == {role: ((role,), (1,)) for role in WITH_REF}


def test_logp_and_its_neighbour_may_share() -> None:
    assert placed(pools_of_ratios([0.375, 0.125, 0.125, 0.5])) == {
        "train": (("train",), (3,)),
        "logp": (("logp", "ref_logp"), (1,)),
        "generate": (("generate",), (4,)),
    }


@given(st.lists(st.integers(1, 9), min_size=4, max_size=4))
def test_accepted_ratios_use_every_device(parts: list[int]) -> None:
    try:
        pools = pools_of_ratios([part / sum(parts) for part in parts])
    except ConfigError:
        assume(False)
    made = place(wishes_of(pools), roles=WITH_REF, devices=sum(parts), node=64)
    assert made.devices == sum(parts)
    assert sorted(role for pool in made.pools for role in pool.roles) == sorted(WITH_REF)


def test_groups_of_stages_with_a_share_each() -> None:
    pools = pools_of_tasks([["logp", "actor-train"], "ref_logp", "generate"], [0.5, 0.25, 0.25])
    assert placed(pools, devices=4) == {
        "train": (("train", "logp"), (2,)),
        "ref_logp": (("ref_logp",), (1,)),
        "generate": (("generate",), (1,)),
    }


# Whole devices.


def test_stages_without_a_pool_share_the_training_devices() -> None:
    pools = {"a": {"roles": ["train"], "devices": 2}, "b": {"roles": ["generate"], "devices": 6}}
    assert placed(pools, roles=PLACED) == {
        "a": (("train", "logp", "ref_logp", "critic"), (2,)),
        "b": (("generate",), (6,)),
    }


def test_a_pool_without_a_stage_of_the_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="no ref_logp, so the devices of pool ref_logp would be idle"):
        placed(four(share=[0.25] * 4), roles=("train", "logp", "generate"))


def test_a_pool_may_name_a_stage_that_the_run_lacks() -> None:
    pools = pools_of_ratios([0.5, 0.25, 0.25, 0.25])
    assert placed(pools, roles=("train", "logp", "generate"))["logp"] == (("logp",), (2,))


@given(
    st.lists(st.integers(1, 20), min_size=4, max_size=4),
    st.integers(4, 4096),
)
def test_shares_become_whole_devices(parts: list[int], devices: int) -> None:
    shares = [part / sum(parts) for part in parts]
    try:
        made = place(wishes_of(four(share=shares)), roles=WITH_REF, devices=devices, node=devices)
    except ConfigError as error:
        assert "gets no device" in str(error)
        assert min(shares) * devices < 1
        return
    assert made.devices == devices
    for pool, share in zip(made.pools, shares, strict=True):
        assert abs(pool.devices - share * devices) < 1 + 1e-6


@pytest.mark.parametrize(
    ("pools", "why"),
    [
        (four(share=[0.4, 0.2, 0.2, 0.1]), "must sum to 1, got 0.4 \\+ 0.2 \\+ 0.2 \\+ 0.1 = 0.9"),
        (
            four(share=[0.94, 0.02, 0.02, 0.02]),
            "pool logp gets no device, its share of 8 is 0.16; raise it to 0.125 and lower another, or "
            "use 50",
        ),
        (four(devices=[5, 1, 1, 2]), "must fit into the 8 devices .* got 9"),
    ],
)
def test_impossible_sizes_are_errors_with_possible_ones(pools: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        placed(pools)


def test_a_pool_is_within_a_node_or_takes_whole_ones() -> None:
    with pytest.raises(
        ConfigError, match="pool train must be within a node of 8 .* got 12; nearest are 8 and 16"
    ):
        placed(four(devices=[12, 1, 1, 2]), devices=16)


def test_pools_that_fit_on_no_node_are_refused() -> None:
    with pytest.raises(
        ConfigError,
        match="pool (train|logp|ref_logp) needs 5 devices of one node, but the others leave at most 3 on "
        "any of 2 nodes of 8",
    ):
        placed(four(devices=[5, 5, 5, 1]), devices=16)
    assert len(placed(four(devices=[5, 5, 3, 3]), devices=16)) == 4


def test_all_sizes_that_are_no_numbers_of_devices_are_named() -> None:
    sizes = {"trainer": {"nnodes": 0, "n_gpus_per_node": 1}}
    with pytest.raises(ConfigError) as raised:
        placement_of(
            {**sizes, "actor_rollout_ref": {"rollout": {"nnodes": 1, "n_gpus_per_node": 0}}}, None, ()
        )
    first, second = raised.value.problems
    assert first.startswith("trainer.nnodes must be >= 1, got 0; training needs devices")
    assert second.startswith("actor_rollout_ref.rollout.n_gpus_per_node must be >= 1, got 0")


def test_a_replica_that_fits_on_no_node_is_refused() -> None:
    wishes = wishes_of(four(devices=[2, 2, 2, 2]))
    with pytest.raises(
        ConfigError,
        match="a replica of pool generate needs 2 devices of one node, but the others leave at most 1 on any "
        "of 3 nodes of 3; make a pool smaller",
    ):
        place(wishes, roles=WITH_REF, devices=9, node=3, replica=2)
    assert place(wishes, roles=WITH_REF, devices=9, node=3, replica=1).devices == 8
    with pytest.raises(ConfigError, match="a replica of pool generate needs 2 devices of one node"):
        placement_of(
            {
                "trainer": {"nnodes": 3, "n_gpus_per_node": 3},
                "actor_rollout_ref": {
                    "rollout": {"nnodes": 0, "n_gpus_per_node": 3, "tensor_model_parallel_size": 2}
                },
            },
            four(devices=[2, 2, 2, 2]),
            WITH_REF,
        )


def test_a_replica_larger_than_a_node_takes_whole_nodes() -> None:
    wishes = wishes_of(four(devices=[16, 4, 4, 32]))
    made = place(wishes, roles=WITH_REF, devices=56, node=8, replica=16)
    assert made.pools[-1].per_node == (8, 8, 8, 8)
    with pytest.raises(
        ConfigError,
        match="pool generate needs 2 whole nodes of 8 devices for replicas of 16, but the others leave 1 of "
        "4 nodes whole; make a pool smaller",
    ):
        place(wishes_of(four(devices=[5, 5, 5, 16])), roles=WITH_REF, devices=32, node=8, replica=16)


def test_large_pools_take_whole_nodes() -> None:
    assert placed(four(devices=[16, 4, 4, 24]), devices=48)["generate"] == (("generate",), (8, 8, 8))


# What comes out.


def test_a_role_is_found() -> None:
    made = place(wishes_of(four(devices=[1, 1, 1, 1])), roles=WITH_REF, devices=4, node=4)
    logp = made.own_pool_of("logp")
    assert logp is not None
    assert (logp.name, logp.devices) == ("logp", 1)
    assert made.own_pool_of("train") is None
    assert made.pool_of("critic") is None
    assert Placement.from_list(made.as_list()) == made


ODD = st.one_of(
    st.none(), st.booleans(), st.integers(-1, 3), st.floats(), st.sampled_from([*PLACED, "rollout", ""])
)
LISTS_OF_ROLES = st.one_of(
    ODD, st.lists(ODD, max_size=3), st.lists(st.lists(ODD, max_size=2) | ODD, max_size=3)
)
SIZED = st.dictionaries(
    st.sampled_from(["roles", "devices", "share", "more"]), ODD | LISTS_OF_ROLES, max_size=3
)


@given(
    st.one_of(ODD, LISTS_OF_ROLES, st.dictionaries(st.sampled_from("abc"), ODD | SIZED, max_size=3)),
    LISTS_OF_ROLES,
)
def test_anything_at_all_is_a_layout_or_refused_in_one_line(pools: Any, more: Any) -> None:
    for read in (
        lambda: wishes_of(pools),
        lambda: pools_of_ratios(pools),
        lambda: pools_of_tasks(pools, more),
        lambda: pools_of_tasks(more, pools),
    ):
        try:
            read()
        except ConfigError as error:
            assert "\n" not in str(error)
