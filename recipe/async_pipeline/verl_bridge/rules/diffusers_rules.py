# SPDX-License-Identifier: Apache-2.0
"""Image policies: refuse options that they do not support, and set the keys of verl that the knobs imply."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, open_dict

from ...config.checks.refusals import Refusal, Settings, any_of, must_be, must_be_off, never, on, refuse
from ...config.derived.adapters import adapter_rank
from ...config.knobs.diffusion import DiffusionConfig
from ...config.knobs.schema import AsyncPipelineConfig
from ...config.paths import OWN
from ...errors import ConfigError

ENGINE = "diffusers"
"""`actor_rollout_ref.rollout.name` of image policies."""
AGENT_LOOP = "diffusion"
MODEL, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.rollout"
MODEL_CONFIG = "recipe.async_pipeline.verl_bridge.workers.diffusion.diffusion_model.DiffusionModelConfig"
REWARDS_MODULE = "pkg://recipe.async_pipeline.verl_bridge.reward.responses"
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
    refuse(RULES, Settings(config, knobs))
    if critic:
        raise ConfigError(
            f"algorithm.adv_estimator must be one without a critic {_FOR_IMAGES}, got "
            f"{config.algorithm.adv_estimator}; grpo is usual"
        )
    _check_sizes(config, knobs.diffusion)


def _check_sizes(config: DictConfig, how: DiffusionConfig) -> None:
    """Raises ConfigError if there is no such image or window."""
    # Import torch and verl's workers, which other runs do not need here.
    from ...diffusion.model_folder import ModelFolder
    from ..workers.diffusion.diffusion_model import Denoising

    folder = ModelFolder(Path(str(config.actor_rollout_ref.model.path)).expanduser())
    try:
        folder.latent_shape(how.height, how.width)
        Denoising.of(how.denoising())
        folder.check_guidance(how.guidance_scale)
    except ConfigError as error:
        raise ConfigError(f"{how.PATH}: {error}") from None


def set_image_keys(config: DictConfig, knobs: AsyncPipelineConfig) -> None:
    """Set verl's keys of an image policy: its model, its agent loop, its rewards, and its tokens."""
    from ...diffusion.model_folder import ModelFolder
    from ..workers.diffusion.diffusion_model import Denoising

    values: dict[str, Any] = knobs.diffusion.denoising()
    model = config.actor_rollout_ref.model
    path = Path(str(model.path)).expanduser()
    with open_dict(config):
        model._target_ = MODEL_CONFIG
        model.model_type = "diffusion_model"
        model.path = str(path)
        model.tokenizer_path = model.tokenizer_path or str(ModelFolder(path).tokenizer)
        model.load_tokenizer = True
        # The update computes it; verl would make a reference policy for it, which estimates it.
        actor = config.actor_rollout_ref.actor
        model.denoising = {**values, "kl": bool(actor.use_kl_loss)}
        actor.use_kl_loss = False
        config.data.max_response_length = Denoising.of(values).num_trained
        config.actor_rollout_ref.rollout.agent.default_agent_loop = AGENT_LOOP
        manager = config.reward.reward_manager
        manager.source, manager.name = "importlib", "VisualRewardManager"
        manager.module.path = REWARDS_MODULE


_ACTOR, _SDE_TYPE = "actor_rollout_ref.actor", f"{DiffusionConfig.PATH}.sde_type"
_ONE_PICTURE = "an episode is one picture"
_KL = f"{_ACTOR}.use_kl_loss"
RULES: tuple[Refusal, ...] = (
    must_be(
        f"{ROLLOUT}.tensor_model_parallel_size", 1, remedy="use more replicas instead", where=_FOR_IMAGES
    ),
    must_be(f"{ROLLOUT}.quantization", None, remedy="leave it out", where=_FOR_IMAGES),
    must_be("actor_rollout_ref.actor.strategy", "fsdp2", remedy="set it", where=_FOR_IMAGES),
    must_be(
        f"{MODEL}.lora.merge",
        False,
        None,
        remedy="leave it out, since adapters are served as they are",
        where=_FOR_IMAGES,
    ),
    must_be(
        "reward.reward_model.enable",
        False,
        None,
        remedy="have the reward function ask a server of rewards",
        where=_FOR_IMAGES,
    ),
    must_be("reward.reward_manager.name", "naive", GERL_REWARDS, remedy=_OWN_REWARDS, where=_FOR_IMAGES),
    must_be("reward_model.reward_manager", None, GERL_REWARDS, remedy=_OWN_REWARDS, where=_FOR_IMAGES),
    must_be("algorithm.filter_groups.enable", False, None, remedy="leave it out", where=_FOR_IMAGES),
    must_be_off(
        _KL,
        f"set {MODEL}.lora_rank: the reference is the transformer without its adapter",
        f"{_FOR_IMAGES} and without an adapter",
        when=lambda at: not adapter_rank(at.config),
    ),
    Refusal(
        f"{_ACTOR}.kl_loss_type",
        any_of("low_var_kl"),
        f"must be left out {_FOR_IMAGES}",
        "the divergence of two Gaussians needs no estimate",
        when=lambda at: at[_KL],
    ),
    must_be(
        "algorithm.use_kl_in_reward",
        False,
        None,
        remedy=f"set {_KL}, since it is part of the loss there",
        where=_FOR_IMAGES,
    ),
    Refusal(f"{OWN}.agentic.environment", any_of(None), f"must be left out {_FOR_IMAGES}", _ONE_PICTURE),
    Refusal(f"{OWN}.agentic.agent", any_of(None), f"must be left out {_FOR_IMAGES}", _ONE_PICTURE),
    Refusal(
        "reward.custom_reward_function.path", on, f"must name a function of images {_FOR_IMAGES}", "set it"
    ),
    Refusal(
        "algorithm.rollout_correction.rollout_is",
        any_of(None),
        f"must be null with {_SDE_TYPE}=cps, whose log-probs are no densities",
        "leave it out, or use sde",
        when=lambda at: at[_SDE_TYPE] == "cps",
    ),
    Refusal(
        "data.train_batch_size",
        never,
        f"must be a multiple of {_ACTOR}.ppo_mini_batch_size=<{_ACTOR}.ppo_mini_batch_size> {_FOR_IMAGES}",
        "verl would fill the batch up with texts",
        when=lambda at: at["data.train_batch_size"] % at[f"{_ACTOR}.ppo_mini_batch_size"],
    ),
)
"""Keys with the values that image policies support."""
