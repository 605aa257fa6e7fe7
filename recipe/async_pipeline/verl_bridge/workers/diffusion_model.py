# SPDX-License-Identifier: Apache-2.0
"""The model of an image policy, as verl's training engine reads its configuration.

verl's engine for FSDP was written for language models and reads a dozen of their settings; they are here with
the values that switch each off.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any

from verl.base_config import BaseConfig

from ...diffusion.model_folder import ModelFolder
from ...diffusion.schedule import Schedule
from ...diffusion.sde import Kind, check_noise
from ...errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Denoising:
    """How the rollout samples, which the trainer repeats."""

    num_inference_steps: int = 10
    height: int = 512
    width: int = 512
    sde_type: Kind = "sde"
    noise_level: float = 0.7

    def __post_init__(self) -> None:
        check_noise(self.sde_type, self.noise_level)
        if self.sde_type == "ode" or self.noise_level == 0:
            raise ConfigError(
                f"training needs steps with noise, got sde_type {self.sde_type} with noise_level "
                f"{self.noise_level}"
            )


@dataclass
class DiffusionModelConfig(BaseConfig):  # type: ignore[misc]
    """A pipeline folder whose transformer is trained, as a whole or by an adapter."""

    path: str = ""
    denoising: Denoising = field(default_factory=Denoising)
    lora_rank: int = 0
    """Rank of the adapter; 0 trains all weights."""
    lora_alpha: int = 16
    target_modules: list[str] | None = None
    """Layers that get an adapter; None for the family's attention layers."""
    lora: dict[str, Any] = field(default_factory=dict)
    """verl's further settings of adapters."""
    enable_gradient_checkpointing: bool = False
    enable_activation_offload: bool = False

    # Of language models.
    model_type: str = "diffusion_model"
    use_remove_padding: bool = False
    trust_remote_code: bool = False
    use_liger: bool = False

    @cached_property
    def folder(self) -> ModelFolder:
        return ModelFolder(self.path)

    @cached_property
    def schedule(self) -> Schedule:
        how = self.denoising
        return self.folder.schedule(how.num_inference_steps, how.height, how.width)

    @property
    def local_path(self) -> str:
        return self.path

    @property
    def adapted_modules(self) -> list[str]:
        return list(self.target_modules or self.folder.family.lora_targets)

    @property
    def hf_config(self) -> Any:
        """Return what verl asks the config of a language model for."""
        family = self.folder.family
        return SimpleNamespace(
            model_type=family.pipeline, architectures=[family.transformer], tie_word_embeddings=False
        )

    def get_processor(self) -> None:
        """Return nothing to be saved with a checkpoint: tokenizers are in the pipeline folder."""
