# SPDX-License-Identifier: Apache-2.0
"""The model of an image policy, as verl reads its configuration.

verl was written for language models and reads a dozen of their settings; they are verl's own, and switched
off where they have no meaning for images.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any

from omegaconf import DictConfig, OmegaConf
from verl.utils import hf_tokenizer
from verl.workers.config import HFModelConfig

from ....diffusion.model_folder import ModelFolder
from ....diffusion.schedule import NoiseSchedule
from ....diffusion.sde import SdeKind, check_noise
from ....diffusion.windows import Windows, windows
from ....errors import ConfigError

CHAT_TEMPLATE = "{%- for message in messages -%}{{- message['content'] -}}{%- endfor -%}"
"""verl asks tokenizers for chat templates; an image model gets the bare prompt."""


@dataclass(frozen=True, kw_only=True)
class Denoising:
    """How the rollout samples, which the trainer repeats."""

    num_inference_steps: int = 10
    height: int = 512
    width: int = 512
    sde_type: SdeKind = "sde"
    noise_level: float = 0.7
    sde_window_size: int | None = None
    """SDE steps of a sample; None for all but the last."""
    sde_window_range: tuple[int, ...] | None = None
    """First step, and the step after the last, that a window may have; None for all but the last."""
    validation_steps: int | None = None
    """Steps of a sample in validation, which has no noise; None for `num_inference_steps`."""
    guidance_scale: float | None = None
    """None for the family's."""
    ema_decay: float | None = None
    """None for no moving average."""
    ema_every: int = 8
    kl: bool = False
    """Whether the loss gets the KL divergence from the transformer without its adapter."""
    max_sequence_length: int | None = None
    """Tokens of a prompt for the T5 encoder; None for the family's."""

    def __post_init__(self) -> None:
        check_noise(self.sde_type, self.noise_level)
        if self.sde_type == "ode" or self.noise_level == 0:
            raise ConfigError(
                f"training needs steps with noise, got sde_type {self.sde_type} with noise_level "
                f"{self.noise_level}"
            )
        self.windows()

    @property
    def num_trained(self) -> int:
        """Return the SDE steps of each sample: verl's tokens of a response."""
        return self.num_inference_steps - 1 if self.sde_window_size is None else self.sde_window_size

    def windows(self) -> Windows:
        """Return how the window of a group is chosen. Raises ConfigError if none fits."""
        return windows(self.num_inference_steps, self.sde_window_size, self.sde_window_range)

    @classmethod
    def of(cls, values: Any) -> Denoising:
        """Return an object of these values, a mapping that may be OmegaConf's."""
        if isinstance(values, DictConfig):
            values = OmegaConf.to_container(values, resolve=True)
        if not isinstance(values, Mapping):
            assert isinstance(values, cls)
            return values
        within = values.get("sde_window_range")
        return cls(**{**values, "sde_window_range": None if within is None else tuple(within)})


@dataclass
class DiffusionModelConfig(HFModelConfig):  # type: ignore[misc]
    """A pipeline folder whose transformer is trained, as a whole or by an adapter.

    Takes all keys of verl's section; settings of language models have no effect.
    """

    path: str = ""
    target_modules: Any = None
    """Layers that get an adapter; None or `all-linear` for the family's attention layers."""
    denoising: Any = field(default_factory=Denoising)
    """A `Denoising`, or its values."""
    model_type: str = "diffusion_model"
    load_tokenizer: bool = False
    """Whether this process needs the tokenizer of prompts; the training workers do not."""
    enable_gradient_checkpointing: bool = False

    _mutable_fields = HFModelConfig._mutable_fields | {
        "denoising",
        "target_modules",
        "use_remove_padding",
        "use_fused_kernels",
        "use_liger",
    }

    def __post_init__(self) -> None:
        """Instead of verl's, which reads the config of a language model."""
        self.denoising = Denoising.of(self.denoising)
        self.local_path = self.path
        self.use_remove_padding = self.use_fused_kernels = self.use_liger = False
        if self.target_modules == "all-linear":
            self.target_modules = None
        family = self.folder.family
        self.hf_config = SimpleNamespace(
            model_type=family.pipeline, architectures=[family.transformer], tie_word_embeddings=False
        )
        self.architectures = [family.transformer]
        if self.load_tokenizer:
            self.tokenizer = hf_tokenizer(self.tokenizer_path or str(self.folder.tokenizer))
            self.tokenizer.chat_template = self.tokenizer.chat_template or CHAT_TEMPLATE

    @cached_property
    def folder(self) -> ModelFolder:
        return ModelFolder(self.path)

    @cached_property
    def schedule(self) -> NoiseSchedule:
        return self._schedule(self.denoising.num_inference_steps)

    @cached_property
    def validation_schedule(self) -> NoiseSchedule:
        how = self.denoising
        return self._schedule(how.validation_steps or how.num_inference_steps)

    def _schedule(self, num_steps: int) -> NoiseSchedule:
        return self.folder.schedule(num_steps, self.denoising.height, self.denoising.width)

    @property
    def adapted_modules(self) -> list[str]:
        """Return the layers that get an adapter."""
        chosen = self.target_modules
        if isinstance(chosen, str):
            return [chosen]
        return list(chosen or self.folder.family.lora_targets)

    def get_processor(self) -> None:
        """Return nothing to be saved with a checkpoint: tokenizers are in the pipeline folder."""
