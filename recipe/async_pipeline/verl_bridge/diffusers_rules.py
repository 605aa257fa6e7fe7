# SPDX-License-Identifier: Apache-2.0
"""Image policies: refuse options that they do not support, and set the keys of verl that the knobs imply."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from verl.trainer.ppo.utils import need_reference_policy

from ..config.diffusion import DiffusionConfig
from ..config.paths import OWN
from ..config.schema import AsyncPipelineConfig
from ..diffusion.model_folder import ModelFolder
from ..errors import ConfigError

ENGINE = "diffusers"
"""`actor_rollout_ref.rollout.name` of image policies."""
AGENT_LOOP = "diffusion"
MODEL, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.rollout"
MODEL_CONFIG = "recipe.async_pipeline.verl_bridge.workers.diffusion_model.DiffusionModelConfig"
REWARDS_MODULE = "pkg://recipe.async_pipeline.verl_bridge.reward.visual"
GERL_REWARDS = "diffusion-batch"
"""What scripts of GeRL call their reward manager of images; pictures are scored one by one here too."""
_OWN_REWARDS = "leave it out; pictures have another reward manager"
_FOR_IMAGES = f"with {ROLLOUT}.name={ENGINE}"


def draws_images(config: DictConfig) -> bool:
    """Return whether the policy of a verl config draws images."""
    return bool(config.actor_rollout_ref.rollout.name == ENGINE)


def check_images(config: DictConfig, knobs: AsyncPipelineConfig, *, critic: bool) -> None:
    """Raises ConfigError if the config of an image policy cannot run, or another config has its knobs."""
    if not draws_images(config):
        if knobs.diffusion != DiffusionConfig():
            raise ConfigError(
                f"{DiffusionConfig.PATH} requires {ROLLOUT}.name={ENGINE}, got "
                f"{config.actor_rollout_ref.rollout.name!r}; set it, or leave the section out"
            )
        return

    if find_spec("diffusers") is None:
        raise ConfigError(
            f"{ROLLOUT}.name={ENGINE} requires diffusers; pip install async_pipeline[diffusion]"
        )
    for path, allowed, remedy in RULES:
        value = OmegaConf.select(config, path)
        if value not in allowed:
            raise ConfigError(f"{path} must be {allowed[0]} {_FOR_IMAGES}, got {value!r}; {remedy}")
    if critic:
        raise ConfigError(
            f"algorithm.adv_estimator must be one without a critic {_FOR_IMAGES}, got "
            f"{config.algorithm.adv_estimator}; grpo is usual"
        )
    if need_reference_policy(config):
        raise ConfigError(
            "actor_rollout_ref.actor.use_kl_loss and algorithm.use_kl_in_reward must be False "
            f"{_FOR_IMAGES}, got True; a reference policy of images is not supported yet"
        )
    if not config.reward.custom_reward_function.path:
        raise ConfigError(
            f"reward.custom_reward_function.path must name a function of images {_FOR_IMAGES}, got None; "
            "set it"
        )
    _check_agents(knobs)
    _check_correction(config, knobs.diffusion)
    _check_batch(config)
    _check_sizes(config, knobs.diffusion)


def _check_batch(config: DictConfig) -> None:
    """Raises ConfigError if verl would pad a batch, with rows that have no latents."""
    prompts, part = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
    if prompts % part:
        raise ConfigError(
            f"data.train_batch_size must be a multiple of actor_rollout_ref.actor.ppo_mini_batch_size={part} "
            f"{_FOR_IMAGES}, got {prompts}; verl would fill the batch up with texts"
        )


def _check_agents(knobs: AsyncPipelineConfig) -> None:
    for name in ("environment", "agent"):
        value = getattr(knobs.agentic, name)
        if value is not None:
            raise ConfigError(f"{OWN}.agentic.{name} must be left out {_FOR_IMAGES}, got {value!r}")


def _check_correction(config: DictConfig, how: DiffusionConfig) -> None:
    weights = OmegaConf.select(config, "algorithm.rollout_correction.rollout_is")
    if how.sde_type == "cps" and weights is not None:
        raise ConfigError(
            f"algorithm.rollout_correction.rollout_is must be null with {how.PATH}.sde_type=cps, whose "
            f"log-probs are no densities, got {weights!r}; leave it out, or use sde"
        )


def _check_sizes(config: DictConfig, how: DiffusionConfig) -> None:
    """Raises ConfigError if there is no such image or window."""
    # Imports verl's workers, which other runs do not need here.
    from .workers.diffusion_model import Denoising

    folder = ModelFolder(Path(str(config.actor_rollout_ref.model.path)).expanduser())
    try:
        folder.latent_shape(how.height, how.width)
        Denoising.of(how.denoising())
    except ConfigError as error:
        raise ConfigError(f"{how.PATH}: {error}") from None


def set_image_keys(config: DictConfig, knobs: AsyncPipelineConfig) -> None:
    """Set verl's keys of an image policy: its model, its agent loop, its rewards, and its tokens."""
    from .workers.diffusion_model import Denoising

    values: dict[str, Any] = knobs.diffusion.denoising()
    model = config.actor_rollout_ref.model
    path = Path(str(model.path)).expanduser()
    with open_dict(config):
        model._target_ = MODEL_CONFIG
        model.model_type = "diffusion_model"
        model.path = str(path)
        model.tokenizer_path = model.tokenizer_path or str(ModelFolder(path).tokenizer)
        model.load_tokenizer = True
        model.denoising = values
        config.data.max_response_length = Denoising.of(values).num_trained
        config.actor_rollout_ref.rollout.agent.default_agent_loop = AGENT_LOOP
        manager = config.reward.reward_manager
        manager.source, manager.name = "importlib", "VisualRewardManager"
        manager.module.path = REWARDS_MODULE


RULES = (
    (f"{ROLLOUT}.tensor_model_parallel_size", (1,), "use more replicas instead"),
    (f"{ROLLOUT}.quantization", (None,), "leave it out"),
    ("actor_rollout_ref.actor.strategy", ("fsdp2",), "set it"),
    (f"{MODEL}.lora.merge", (False, None), "leave it out, since adapters are served as they are"),
    ("reward.reward_model.enable", (False, None), "have the reward function ask a server of rewards"),
    ("reward.reward_manager.name", ("naive", GERL_REWARDS), _OWN_REWARDS),
    ("reward_model.reward_manager", (None, GERL_REWARDS), _OWN_REWARDS),
    ("algorithm.filter_groups.enable", (False, None), "leave it out"),
)
"""Keys with the values that image policies support."""
