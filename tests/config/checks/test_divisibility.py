# SPDX-License-Identifier: Apache-2.0
"""A pool that cannot divide samples, or that replicas do not fill, is an error with the nearest sizes."""

from __future__ import annotations

import pytest

from recipe.async_pipeline.config.checks.divisibility import (
    check_class,
    check_divides,
    check_replicas,
    divisor_below,
)
from recipe.async_pipeline.config.placement import Pool
from recipe.async_pipeline.errors import ConfigError
from tests.refusals import Refused, cases_of


@cases_of("samples")
def test_samples_must_divide_evenly(case: Refused) -> None:
    def check(sizes: dict[str, int]) -> None:
        pool = Pool("a", ("train",), (sizes["devices"],))
        check_divides(pool, sizes["samples"], "a mini-batch", sizes.get("ranks", 1))

    check({"devices": 8, "samples": 128})
    check({"devices": 8, "samples": 12, "ranks": 2})
    case.replay(check)


def test_the_nearest_divisor_below() -> None:
    assert [divisor_below(30, most) for most in (64, 30, 29, 4, 1, 0)] == [30, 30, 15, 3, 1, 1]


TP = "tensor_model_parallel_size"


@cases_of("replicas")
def test_replicas_fill_nodes(case: Refused) -> None:
    def check(per_node: list[int], size: int) -> None:
        check_replicas(Pool("a", ("generate",), tuple(per_node)), size, TP)

    case.replay(lambda sizes: check(**sizes))
    per_node = case.changes["per_node"]
    for fits in (n for n in range(1, per_node[0] + 1) if per_node[0] % n == 0):
        check(per_node, fits)


@pytest.mark.parametrize(
    ("per_node", "size"), [((8, 8), 16), ((1, 1), 2), ((8,) * 4, 16), ((8,) * 4, 32), ((8,) * 32, 16)]
)
def test_a_replica_takes_whole_nodes(per_node: tuple[int, ...], size: int) -> None:
    check_replicas(Pool("a", ("generate",), per_node), size, TP)


def test_the_key_of_the_devices_is_part_of_the_remedy() -> None:
    with pytest.raises(ConfigError, match="give the rollout 2 devices with KEY$"):
        check_replicas(Pool("a", ("generate",), (1,)), 2, TP, "KEY")


def _check(engine: str, name: str) -> None:
    check_class(
        {"critic": {"strategy": engine, "_target_": f"verl.workers.config.{name}CriticConfig"}}, "critic"
    )


@pytest.mark.parametrize(
    ("engine", "name"),
    [
        ("fsdp", "FSDP"),
        ("fsdp2", "FSDP"),
        ("fsdp_turbo", "FSDP"),
        ("megatron", "Mcore"),
        ("veomni", "VeOmni"),
        ("torchtitan", "TorchTitan"),
        ("megatron", "Own"),
    ],
)
def test_an_engine_has_its_own_configuration(engine: str, name: str) -> None:
    _check(engine, name)


@pytest.mark.parametrize("engine", ["megatron", "veomni", "torchtitan"])
def test_the_strategy_alone_does_not_choose_the_configuration(engine: str) -> None:
    wrong = (
        f"critic.strategy={engine} requires .* got the one of FSDPCriticConfig; set model_engine={engine}$"
    )
    with pytest.raises(ConfigError, match=wrong):
        _check(engine, "FSDP")


@pytest.mark.parametrize(
    ("name", "chosen"), [("Mcore", "megatron"), ("VeOmni", "veomni"), ("TorchTitan", "torchtitan")]
)
@pytest.mark.parametrize("engine", ["fsdp2", "fsdp_turbo"])
def test_the_configuration_alone_does_not_choose_the_strategy(engine: str, name: str, chosen: str) -> None:
    wrong = f"critic.strategy must be {chosen} with model_engine={chosen}, got {engine}; set it"
    with pytest.raises(ConfigError, match=wrong):
        _check(engine, name)
