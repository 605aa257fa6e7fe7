# SPDX-License-Identifier: Apache-2.0
"""A config of an image policy is refused in one line, or gets verl's keys that make it run."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from omegaconf import OmegaConf

from recipe.async_pipeline.config.paths import OWN
from recipe.async_pipeline.errors import ConfigError
from tests.refusals import Refused, cases_of
from tests.verl_bridge.conftest import Smoke

pytestmark = pytest.mark.real_engine
ROLLOUT = "actor_rollout_ref.rollout"
FILES = {
    "model_index.json": {"_class_name": "StableDiffusion3Pipeline"},
    "transformer/config.json": {"in_channels": 4, "patch_size": 2},
    "scheduler/scheduler_config.json": {"shift": 3.0},
    "vae/config.json": {"block_out_channels": [8, 16]},
}


@pytest.fixture
def images(smoke: Smoke, tmp_path: Path, module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Smoke:
    """Configs of image policies, whether or not diffusers is installed."""
    monkeypatch.setattr(module, "find_spec", lambda name: name)
    for name, content in FILES.items():
        (tmp_path / "pipeline" / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / "pipeline" / name).write_text(json.dumps(content))

    def make(changes: dict[str, Any] | None = None, **more: Any) -> Any:
        chosen = {
            f"{ROLLOUT}.name": "diffusers",
            "actor_rollout_ref.model.path": str(tmp_path / "pipeline"),
            f"{OWN}.diffusion": {"height": 16, "width": 16, "sde_window_size": 3, "sde_window_end": 5},
        }
        return smoke({**chosen, **(changes or {})}, **more)

    return make


def test_the_knobs_imply_keys_of_verl(launch: ModuleType, images: Smoke, tmp_path: Path) -> None:
    config = images()
    launch.prepare(config)
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    assert model["_target_"].endswith("DiffusionModelConfig") and model.model_type == "diffusion_model"
    assert model.tokenizer_path == str(tmp_path / "pipeline" / "tokenizer")
    assert model.denoising.sde_window_range == [0, 5] and model.denoising.height == 16
    assert rollout.response_length == config.data.max_response_length == 3
    assert rollout.agent.default_agent_loop == "diffusion"
    assert config.reward.reward_manager.name == "VisualRewardManager"


def test_a_guarded_reward_function_gets_the_picture_too(launch: ModuleType, images: Smoke) -> None:
    config = images({f"{OWN}.reward.timeout_s": 5})
    launch.prepare(config)
    assert config.reward.reward_manager.name == "GuardedRewardManager"
    inner = OmegaConf.select(config, "trainer.v1.async_pipeline_runtime.reward_manager")
    assert inner.name == "VisualRewardManager"


@cases_of("images")
def test_what_images_do_not_support_is_refused(launch: ModuleType, images: Smoke, case: Refused) -> None:
    case.replay(lambda changes: launch.checked(images(changes)))


def test_the_library_must_be_installed(
    launch: ModuleType, images: Smoke, module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"requires diffusers; pip install async_pipeline\[diffusion\]"):
        launch.checked(images())
