# SPDX-License-Identifier: Apache-2.0
"""The knobs of image policies; a section of `schema`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from ...errors import ConfigError
from ..paths import OWN
from .fields import Bounds, Positive, check_fields


@dataclass(frozen=True, kw_only=True)
class DiffusionConfig:
    """How images are drawn, with actor_rollout_ref.rollout.name=diffusers. A step that is drawn with noise,
    an SDE step, is to an image what a token is to a text: it is trained."""

    PATH: ClassVar[str] = f"{OWN}.diffusion"
    MAY_CHANGE: ClassVar[tuple[str, ...]] = ("validation_steps",)
    """Knobs that a resumed run may have with other values; see `fields`."""

    num_inference_steps: Positive = 10
    """Denoising steps of an image in training."""
    validation_steps: Positive | None = None
    """Denoising steps of an image in validation, where no step adds noise. Default: num_inference_steps."""
    height: Positive = 512
    """Height of an image in pixels."""
    width: Positive = 512
    """Width of an image in pixels."""
    sde_type: Literal["sde", "cps", "dance_sde"] = "sde"
    """How a step adds noise: sde (Flow-GRPO), cps (steps that preserve the coefficients; its log-probs are no
    densities), or dance_sde (DanceGRPO)."""
    noise_level: Annotated[float, Bounds(above=0, remedy="0.7 is usual for sde, 0.8 for cps")] = 0.7
    """How much noise a step adds."""
    sde_window_size: Positive | None = None
    """Consecutive steps of each image that add noise and are trained; the others cost no training. Their
    place is drawn for each prompt. Default: all steps but the last."""
    sde_window_first: Annotated[int, Bounds(least=0, remedy="0 is the first step")] = 0
    """The first step that a window may have, counted from 0. Requires sde_window_size."""
    sde_window_end: Positive | None = None
    """The step before which all windows end. Requires sde_window_size. Default: the last step."""
    guidance_scale: (
        Annotated[float, Bounds(above=0, remedy="4.5 is usual for Stable Diffusion 3.5")] | None
    ) = None
    """Guidance of all images. Stable Diffusion 3: above 1, each step also computes the velocity of the empty
    prompt, in training too. FLUX: the input of a guidance-distilled model. Default: 1, or 3.5 for FLUX."""
    ema_decay: Annotated[float, Bounds(above=0, most=0.9999, remedy="0.9 is usual")] | None = None
    """Keep an exponential moving average of the trained weights, which checkpoints have next to them; images
    are drawn without it. Default: none."""
    ema_every: Positive = 8
    """Optimizer steps from one update of the average to the next."""
    max_sequence_length: Positive | None = None
    """Tokens of a prompt for the T5 encoder. Default: 256 for Stable Diffusion 3, 512 for FLUX."""

    def __post_init__(self) -> None:
        check_fields(self, self.PATH)
        if self.ema_decay is None and self.ema_every != type(self).ema_every:
            raise ConfigError(
                f"{self.PATH}.ema_every={self.ema_every} requires {self.PATH}.ema_decay; set it"
            )
        if self.sde_window_size is None:
            for name in ("sde_window_first", "sde_window_end"):
                value = getattr(self, name)
                if value != getattr(type(self), name):
                    raise ConfigError(
                        f"{self.PATH}.{name}={value!r} requires {self.PATH}.sde_window_size; set it"
                    )

    def denoising(self) -> dict[str, Any]:
        """Return the arguments of `verl_bridge.workers.diffusion.diffusion_model.Denoising`."""
        within = None
        if self.sde_window_size is not None:
            end = self.num_inference_steps - 1 if self.sde_window_end is None else self.sde_window_end
            within = [self.sde_window_first, end]
        return {
            "num_inference_steps": self.num_inference_steps,
            "validation_steps": self.validation_steps,
            "height": self.height,
            "width": self.width,
            "sde_type": self.sde_type,
            "noise_level": self.noise_level,
            "sde_window_size": self.sde_window_size,
            "sde_window_range": within,
            "guidance_scale": self.guidance_scale,
            "ema_decay": self.ema_decay,
            "ema_every": self.ema_every,
            "max_sequence_length": self.max_sequence_length,
        }
