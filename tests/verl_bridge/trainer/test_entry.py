# SPDX-License-Identifier: Apache-2.0
"""`trainer.v1.trainer_mode=async_pipeline` leads from verl's registry to the trainer of the strategy."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from recipe.async_pipeline.config.paths import MODE, PATCH_FREE
from recipe.async_pipeline.errors import ConfigError
from recipe.async_pipeline.verl_bridge import hooks
from tests.conftest import Load

pytestmark = pytest.mark.real_engine


@pytest.fixture(scope="module")
def registry(load: Load) -> ModuleType:
    """verl's registry, in a process in which nothing but verl was imported."""
    load("verl")
    return load("verl.trainer.ppo.v1.trainer_base")


def chosen() -> DictConfig:
    return OmegaConf.create({"trainer": {"v1": {"trainer_mode": PATCH_FREE}}})


def test_verls_registry_has_the_mode(registry: ModuleType) -> None:
    found = registry.get_trainer_cls(PATCH_FREE)
    assert found.__module__ == "recipe.async_pipeline.verl_bridge.trainer.entry"


def test_the_trainer_is_the_one_of_the_strategy(
    registry: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets the config that verl keeps, after this package has prepared it."""
    made: list[tuple[DictConfig, str]] = []

    class Trainer(registry.PPOTrainer):  # type: ignore[misc, name-defined]
        def __init__(self, config: DictConfig) -> None:
            made.append((config, config.trainer.v1.trainer_mode))

        def on_sample_end(self) -> None: ...

        def on_step_end(self) -> None: ...

    def adopt(config: DictConfig) -> None:
        OmegaConf.update(config, MODE, "a_strategy")

    monkeypatch.setitem(registry.TRAINER_REGISTRY, "a_strategy", Trainer)
    monkeypatch.setattr(hooks, "adopt", adopt)
    config = chosen()
    trainer = registry.get_trainer_cls(PATCH_FREE)(config=config)
    assert type(trainer) is Trainer
    assert made == [(config, "a_strategy")] and made[0][0] is config, "and made once"


def test_a_run_that_cannot_start_makes_no_trainer(
    registry: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def adopt(config: Any) -> None:
        raise ConfigError("a wrong key")

    monkeypatch.setattr(hooks, "adopt", adopt)
    with pytest.raises(ConfigError, match="a wrong key"):
        registry.get_trainer_cls(PATCH_FREE)(config=chosen())
