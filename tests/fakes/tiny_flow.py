# SPDX-License-Identifier: Apache-2.0
"""Velocity fields of a few thousand parameters: one in plain torch, and transformers of diffusers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from recipe.async_pipeline.diffusion.schedule import NoiseSchedule, shifted_schedule
from recipe.async_pipeline.diffusion.step_engine import SampleRequest, Sampling
from recipe.async_pipeline.diffusion.windows import RandomWindow, seed_of

SHAPE = (2, 4, 4)
STEPS = 6


class Field(torch.nn.Module):
    """A multilayer perceptron of a latent, its noise level and a condition of 5 numbers."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(32 + 1 + 5, 48), torch.nn.Tanh(), torch.nn.Linear(48, 32)
            )
        self.rows: list[int] = []
        """Rows of each forward."""

    def forward(
        self, x: torch.Tensor, sigma: torch.Tensor, conditions: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        self.rows.append(len(x))
        given = torch.cat([x.flatten(1), sigma[:, None], conditions["prompt"]], dim=1)
        velocity: torch.Tensor = self.layers(given)
        return velocity.view_as(x)


def schedule(num_steps: int = STEPS) -> NoiseSchedule:
    return shifted_schedule(num_steps, shift=3.0, last=1 / num_steps)


def requests(
    groups: int, samples: int, *, kind: Any = "sde", noise_level: float = 0.7
) -> list[SampleRequest]:
    """The samples of some prompt groups; a group has one prompt and one window."""
    chosen = RandomWindow(size=3, first=0, end=5, num_steps=STEPS)
    made = []
    for group in range(groups):
        sampling = Sampling(
            schedule=schedule(),
            shape=SHAPE,
            kind=kind,
            noise_level=noise_level,
            window=chosen.of(seed_of("group", group), 0),
        )
        prompt = torch.randn(5, generator=torch.Generator().manual_seed(group))
        for sample in range(samples):
            name = f"{group}/{sample}"
            made.append(
                SampleRequest(
                    name=name,
                    conditions={"prompt": prompt},
                    seed=seed_of(7, group, sample),
                    sampling=sampling,
                )
            )
    return made


def tiny_sd3(seed: int = 0, *, layers: int = 2) -> Any:
    """A transformer of Stable Diffusion 3: latents (4, 8, 8), states 16 wide, pooled 24. Needs diffusers."""
    from diffusers import SD3Transformer2DModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return SD3Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=layers,
            num_attention_heads=2,
            attention_head_dim=8,
            joint_attention_dim=16,
            caption_projection_dim=16,
            pooled_projection_dim=24,
            pos_embed_max_size=8,
        ).eval()


def tiny_flux(seed: int = 0, *, guided: bool = False) -> Any:
    """A transformer of FLUX with the same latents and widths. Needs diffusers."""
    from diffusers import FluxTransformer2DModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return FluxTransformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            num_attention_heads=2,
            attention_head_dim=16,
            joint_attention_dim=16,
            pooled_projection_dim=24,
            axes_dims_rope=(4, 6, 6),
            guidance_embeds=guided,
        ).eval()


def tiny_conditions(seed: int = 0) -> dict[str, torch.Tensor]:
    """Conditions of one prompt for the transformers above."""
    draw = torch.Generator().manual_seed(seed)
    return {
        "encoder_hidden_states": torch.randn(5, 16, generator=draw),
        "pooled_projections": torch.randn(24, generator=draw),
    }


def tiny_folder(path: Path, seed: int = 0) -> Path:
    """Write a pipeline folder with a transformer and, of the other parts, what describes them."""
    tiny_sd3(seed).save_pretrained(path / "transformer")
    for name, content in {
        "model_index.json": {"_class_name": "StableDiffusion3Pipeline"},
        "scheduler/scheduler_config.json": {"shift": 3.0, "num_train_timesteps": 1000},
        "vae/config.json": {"block_out_channels": [8, 16]},
    }.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(json.dumps(content), encoding="utf-8")
    return path
