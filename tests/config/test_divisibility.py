# SPDX-License-Identifier: Apache-2.0
"""A pool that cannot divide samples, or that replicas do not fill, is an error with the nearest sizes."""

from __future__ import annotations

import pytest

from recipe.async_pipeline.config.divisibility import check_divides, check_replicas, divisor_below
from recipe.async_pipeline.config.placement import Pool
from recipe.async_pipeline.errors import ConfigError


def test_samples_must_divide_evenly() -> None:
    check_divides(Pool("a", ("train",), (8,)), 128, "a mini-batch")
    with pytest.raises(
        ConfigError, match="a mini-batch, 128 samples, .* 6 devices of pool a; nearest sizes are 4 and 8"
    ):
        check_divides(Pool("a", ("train",), (6,)), 128, "a mini-batch")
    with pytest.raises(ConfigError, match="nearest sizes are 5$"):
        check_divides(Pool("a", ("train",), (6,)), 5, "a mini-batch")


def test_devices_that_share_a_sequence_count_once() -> None:
    pool = Pool("a", ("train",), (8,))
    check_divides(pool, 12, "a mini-batch", 2)
    with pytest.raises(
        ConfigError,
        match=r"6 samples, must be divisible by the 4 data-parallel ranks \(8 devices of pool a, "
        r"2 for each rank\); nearest sizes are 6 and 12 devices$",
    ):
        check_divides(pool, 6, "a mini-batch", 2)


def test_the_nearest_divisor_below() -> None:
    assert [divisor_below(30, most) for most in (64, 30, 29, 4, 1, 0)] == [30, 30, 15, 3, 1, 1]


TP = "tensor_model_parallel_size"


@pytest.mark.parametrize(
    ("per_node", "size", "why"),
    [
        (
            (8, 8),
            12,
            "must be a multiple of the 8 rollout devices of a node if a replica takes several nodes, got 12; "
            "set it to 8 or 16$",
        ),
        (
            (8, 8, 8),
            16,
            "must divide the 3 nodes of 8 rollout devices, got 16, which is 2 nodes for each replica; set it "
            "to 8, or give the rollout 2 or 4 nodes$",
        ),
        ((4, 4), 12, "must divide the 2 nodes .* set it to 8, or give the rollout 3 nodes$"),
        (
            (6, 6),
            4,
            "must divide the 2 nodes of 6 rollout devices, got 4; set it to 3 or give .* 4 or 8 .* each",
        ),
        (
            (6,),
            4,
            "must divide the 6 rollout devices, got 4; set it to 3 or give the rollout 4 or 8 devices$",
        ),
        ((4,), 8, "must divide the 4 rollout devices, got 8; set it to 4 or give the rollout 8 devices"),
        ((4,), 0, "must divide the 4 rollout devices, got 0; set it to 1 or give the rollout 1 devices"),
    ],
)
def test_replicas_fill_nodes(per_node: tuple[int, ...], size: int, why: str) -> None:
    pool = Pool("a", ("generate",), per_node)
    with pytest.raises(ConfigError, match=f"^{TP} {why}"):
        check_replicas(pool, size, TP)
    for fits in (n for n in range(1, per_node[0] + 1) if per_node[0] % n == 0):
        check_replicas(pool, fits, TP)


@pytest.mark.parametrize(
    ("per_node", "size"), [((8, 8), 16), ((1, 1), 2), ((8,) * 4, 16), ((8,) * 4, 32), ((8,) * 32, 16)]
)
def test_a_replica_takes_whole_nodes(per_node: tuple[int, ...], size: int) -> None:
    check_replicas(Pool("a", ("generate",), per_node), size, TP)


def test_the_key_of_the_devices_is_part_of_the_remedy() -> None:
    with pytest.raises(ConfigError, match="give the rollout 2 devices with KEY$"):
        check_replicas(Pool("a", ("generate",), (1,)), 2, TP, "KEY")
