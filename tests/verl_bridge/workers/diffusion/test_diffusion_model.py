# SPDX-License-Identifier: Apache-2.0
"""The configuration of an image policy has what verl's engine reads of a language model's."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from types import ModuleType

import pytest

from recipe.async_pipeline.errors import ConfigError

pytestmark = pytest.mark.real_engine


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


def test_verl_s_section_is_taken_as_it_is(module: ModuleType, path: Path) -> None:
    """All keys of verl's section of a language model, as hydra passes them."""
    from omegaconf import OmegaConf
    from verl.utils.config import omega_conf_to_dataclass

    section = OmegaConf.load(str(files("verl.trainer.config") / "_generated_ppo_trainer.yaml"))
    config = section.actor_rollout_ref.model
    config.update(
        _target_=f"{module.__name__}.DiffusionModelConfig",
        path=str(path),
        load_tokenizer=False,
        denoising={"num_inference_steps": 4, "sde_window_size": 2, "sde_window_range": [0, 3]},
    )
    found = omega_conf_to_dataclass(config)
    assert found.denoising.num_trained == 2 and found.denoising.sde_window_range == (0, 3)
    assert found.schedule.num_steps == 4 and found.use_remove_padding is False
    assert "to_q" in found.adapted_modules, "all-linear is the family's choice"


def test_validation_has_its_own_schedule(module: ModuleType, path: Path) -> None:
    config = module.DiffusionModelConfig(path=str(path), denoising={"validation_steps": 28})
    assert (config.schedule.num_steps, config.validation_schedule.num_steps) == (10, 28)
    assert module.DiffusionModelConfig(path=str(path)).validation_schedule.num_steps == 10


def test_windows_that_do_not_fit_are_refused(module: ModuleType) -> None:
    with pytest.raises(ConfigError, match="an SDE window of 4 steps does not fit"):
        module.Denoising(num_inference_steps=4, sde_window_size=4)
