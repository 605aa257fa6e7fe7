# SPDX-License-Identifier: Apache-2.0
"""The configuration of an image policy has what verl's engine reads of a language model's."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from recipe.async_pipeline.errors import ConfigError
from tests.conftest import Load

pytestmark = pytest.mark.real_engine


@pytest.fixture(scope="module")
def module(load: Load) -> ModuleType:
    return load("recipe.async_pipeline.verl_bridge.workers.diffusion_model")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    for name, content in {
        "model_index.json": {"_class_name": "StableDiffusion3Pipeline"},
        "transformer/config.json": {"in_channels": 16, "patch_size": 2},
        "scheduler/scheduler_config.json": {"shift": 3.0},
        "vae/config.json": {"block_out_channels": [128, 256, 512, 512]},
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(content))
    return tmp_path


def test_the_schedule_and_the_layers_are_the_folder_s(module: ModuleType, path: Path) -> None:
    config = module.DiffusionModelConfig(path=str(path))
    assert config.schedule.num_steps == 10
    assert "to_q" in config.adapted_modules
    assert config.hf_config.model_type == "StableDiffusion3Pipeline"
    chosen = module.DiffusionModelConfig(path=str(path), target_modules=["to_v"])
    assert chosen.adapted_modules == ["to_v"]


def test_settings_of_language_models_are_off(module: ModuleType, path: Path) -> None:
    config = module.DiffusionModelConfig(path=str(path))
    off = ("use_remove_padding", "trust_remote_code", "use_liger", "enable_activation_offload")
    assert not any(config[name] for name in off)
    assert config.get("use_liger", True) is False
    assert config.lora.get("merge", False) is False
    assert config.get_processor() is None and config.hf_config.tie_word_embeddings is False


@pytest.mark.parametrize("how", [{"sde_type": "ode"}, {"noise_level": 0.0}])
def test_steps_without_noise_are_not_trained(module: ModuleType, how: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="training needs steps with noise"):
        module.Denoising(**how)
