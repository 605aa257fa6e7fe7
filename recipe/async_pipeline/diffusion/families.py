# SPDX-License-Identifier: Apache-2.0
"""The families of models: how a transformer is called, and which parts of it are sharded and adapted.

A latent here is always (channels, height, width); a family that works on a sequence of patches packs it for
the call. `conditions` are what the text encoders say about a prompt, as named tensors, in a batch with the
rows in front.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from ..errors import ConfigError
from .schedule import NoiseSchedule, shifted, shifted_schedule

Conditions = Mapping[str, torch.Tensor]
EMPTY = "empty_"
"""Prefix of the conditions of the empty prompt, which are there if the guidance needs them."""
_ATTENTION = (
    *("to_q", "to_k", "to_v", "to_out.0"),
    *("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
)


class Family(ABC):
    """What differs between families; without weights."""

    pipeline: ClassVar[str]
    """The class in `model_index.json`."""
    transformer: ClassVar[str]
    """The class of the trained part in diffusers."""
    blocks: ClassVar[tuple[str, ...]]
    """Classes of the layers, each of which FSDP shards by itself."""
    lora_targets: ClassVar[tuple[str, ...]] = _ATTENTION
    """Linear layers that get adapters if the configuration names none."""
    max_sequence_length: ClassVar[int]
    """Tokens of the T5 tower if the configuration says nothing."""

    def conditions(self, scale: float | None) -> tuple[str, ...]:
        """Return the names of the conditions of a velocity with this guidance."""
        names = ("encoder_hidden_states", "pooled_projections")
        return (*names, *(EMPTY + name for name in names)) if self.guides_by_empty_prompt(scale) else names

    @abstractmethod
    def latent_channels(self, config: Mapping[str, Any]) -> int:
        """Return the channels of a latent, by the transformer's config."""

    @abstractmethod
    def schedule(self, num_steps: int, scheduler: Mapping[str, Any], tokens: int) -> NoiseSchedule:
        """Return the noise levels that the model is sampled with; `tokens`: patches of the image."""

    @abstractmethod
    def check_guidance(self, scale: float | None, config: Mapping[str, Any]) -> None:
        """Raises ConfigError if the transformer with this config has no guidance of this scale."""

    def guides_by_empty_prompt(self, scale: float | None) -> bool:
        """Return whether a velocity of this guidance needs the conditions of the empty prompt, too."""
        return False

    @abstractmethod
    def velocity(
        self,
        model: torch.nn.Module,
        x: torch.Tensor,
        sigma: torch.Tensor,
        conditions: Conditions,
        scale: float | None = None,
    ) -> torch.Tensor:
        """Return the velocity of each row; float32, shaped as `x`. Each row has its own noise level.

        `scale`: of the guidance; None for the family's.
        """


class StableDiffusion3(Family):
    """Stable Diffusion 3 and 3.5 (arXiv 2403.03206)."""

    pipeline = "StableDiffusion3Pipeline"
    transformer = "SD3Transformer2DModel"
    blocks = ("JointTransformerBlock",)
    max_sequence_length = 256

    def latent_channels(self, config: Mapping[str, Any]) -> int:
        return int(config["in_channels"])

    def schedule(self, num_steps: int, scheduler: Mapping[str, Any], tokens: int) -> NoiseSchedule:
        """Return levels down to the smallest one of training; diffusers shifts that one twice."""
        smallest = 1 / scheduler.get("num_train_timesteps", 1000)
        if scheduler.get("use_dynamic_shifting", False):
            return shifted_schedule(num_steps, shift=dynamic_shift(scheduler, tokens), last=smallest)
        shift = scheduler.get("shift", 1.0)
        last = shifted(torch.tensor(smallest, dtype=torch.float64), shift)
        return shifted_schedule(num_steps, shift=shift, last=float(last))

    def check_guidance(self, scale: float | None, config: Mapping[str, Any]) -> None:
        """Any model of the family can be guided."""

    def guides_by_empty_prompt(self, scale: float | None) -> bool:
        return scale not in (None, 1.0)

    def velocity(
        self,
        model: torch.nn.Module,
        x: torch.Tensor,
        sigma: torch.Tensor,
        conditions: Conditions,
        scale: float | None = None,
    ) -> torch.Tensor:
        """Guide without a classifier (arXiv 2207.12598): from the empty prompt's velocity to the prompt's,
        and further if the scale is above 1. Both are rows of one forward.
        """
        if scale is not None and self.guides_by_empty_prompt(scale):
            whole = {
                name: torch.cat([conditions[EMPTY + name], one])
                for name, one in conditions.items()
                if not name.startswith(EMPTY)
            }
            without, given = self.velocity(model, x.repeat(2, 1, 1, 1), sigma.repeat(2), whole).chunk(2)
            return without + scale * (given - without)
        dtype = dtype_of(model)
        predicted: torch.Tensor = model(
            hidden_states=x.to(dtype),
            timestep=sigma.float() * 1000,
            encoder_hidden_states=conditions["encoder_hidden_states"].to(dtype),
            pooled_projections=conditions["pooled_projections"].to(dtype),
            return_dict=False,
        )[0]
        return predicted.float()


class Flux(Family):
    """FLUX.1: a latent is a sequence of 2 x 2 patches, and the guidance scale is an input."""

    pipeline = "FluxPipeline"
    transformer = "FluxTransformer2DModel"
    blocks = ("FluxTransformerBlock", "FluxSingleTransformerBlock")
    max_sequence_length = 512
    distilled_guidance: ClassVar[float] = 3.5
    """The guidance scale that guidance-distilled models get as an input unless another is configured."""

    def latent_channels(self, config: Mapping[str, Any]) -> int:
        return int(config["in_channels"]) // 4

    def schedule(self, num_steps: int, scheduler: Mapping[str, Any], tokens: int) -> NoiseSchedule:
        """Return levels of equally spaced times down to 1 / steps, shifted by the size of the image."""
        dynamic = scheduler.get("use_dynamic_shifting", False)
        shift = dynamic_shift(scheduler, tokens) if dynamic else scheduler.get("shift", 1.0)
        return shifted_schedule(num_steps, shift=shift, last=1 / num_steps)

    def check_guidance(self, scale: float | None, config: Mapping[str, Any]) -> None:
        if scale is not None and not config.get("guidance_embeds", False):
            raise ConfigError(
                f"guidance_scale must be left out for a FLUX without an input for it, got {scale:g}"
            )

    def velocity(
        self,
        model: torch.nn.Module,
        x: torch.Tensor,
        sigma: torch.Tensor,
        conditions: Conditions,
        scale: float | None = None,
    ) -> torch.Tensor:
        dtype, (rows, _, height, width) = dtype_of(model), x.shape
        states = conditions["encoder_hidden_states"]
        guided = getattr(_config(model), "guidance_embeds", False)
        predicted: torch.Tensor = model(
            hidden_states=packed(x).to(dtype),
            timestep=sigma.float(),
            guidance=x.new_full((rows,), self.distilled_guidance if scale is None else scale)
            if guided
            else None,
            encoder_hidden_states=states.to(dtype),
            pooled_projections=conditions["pooled_projections"].to(dtype),
            txt_ids=x.new_zeros(states.shape[1], 3),
            img_ids=patch_ids(height // 2, width // 2).to(x),
            return_dict=False,
        )[0]
        return unpacked(predicted.float(), height, width)


FAMILIES: Mapping[str, Family] = {one.pipeline: one for one in (StableDiffusion3(), Flux())}
"""By the class in `model_index.json`."""


def family_of(pipeline: str) -> Family:
    """Return the family of a pipeline. Raises ConfigError if it is not supported."""
    try:
        return FAMILIES[pipeline]
    except KeyError:
        raise ConfigError(
            f"actor_rollout_ref.model.path holds a {pipeline}; supported are {', '.join(FAMILIES)}"
        ) from None


def dynamic_shift(scheduler: Mapping[str, Any], tokens: int) -> float:
    """Return the shift for an image of this many patches: exp of a line through two configured sizes."""
    low, high = scheduler.get("base_image_seq_len", 256), scheduler.get("max_image_seq_len", 4096)
    first, last = scheduler.get("base_shift", 0.5), scheduler.get("max_shift", 1.15)
    return math.exp(first + (last - first) * (tokens - low) / (high - low))


def packed(x: torch.Tensor) -> torch.Tensor:
    """Return latents as sequences of 2 x 2 patches: (rows, patches, 4 * channels)."""
    rows, channels, height, width = x.shape
    patches = x.view(rows, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(rows, height // 2 * (width // 2), channels * 4)


def unpacked(patches: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Return sequences of patches as latents; the inverse of `packed`."""
    rows, _, depth = patches.shape
    x = patches.view(rows, height // 2, width // 2, depth // 4, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return x.reshape(rows, depth // 4, height, width)


def patch_ids(height: int, width: int) -> torch.Tensor:
    """Return (0, row, column) of each patch, in the order of the sequence."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).view(-1, 3).float()


def stacked(conditions: Sequence[Conditions]) -> dict[str, torch.Tensor]:
    """Return the conditions of several rows as one batch."""
    return {name: torch.stack([one[name] for one in conditions]) for name in conditions[0]}


def dtype_of(model: torch.nn.Module) -> torch.dtype:
    """Return the dtype that a model computes in."""
    return next(p.dtype for p in model.parameters() if p.is_floating_point())


def _config(model: torch.nn.Module) -> Any:
    """Return the model's config, also of a model with adapters around it."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return inner.config
