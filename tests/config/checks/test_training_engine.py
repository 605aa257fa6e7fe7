# SPDX-License-Identifier: Apache-2.0
"""A section and the training engine that is chosen for it."""

from __future__ import annotations

import pytest

from recipe.async_pipeline.config.checks.training_engine import check_class
from recipe.async_pipeline.errors import ConfigError


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
