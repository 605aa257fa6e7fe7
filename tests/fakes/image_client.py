# SPDX-License-Identifier: Apache-2.0
"""A server that draws every image at once, and the agent loop `diffusion` with it."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from recipe.async_pipeline.config.paths import OWN

LATENTS = np.arange(4 * 2, dtype=np.float32).reshape(4, 2, 1, 1)
ROW = {"raw_prompt": [{"role": "user", "content": "red square"}], "global_steps": 3, "index": 5, "uid": "a"}


class Client:
    """A server that draws every request."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    async def generate(self, request_id: str, *, prompt_ids: Any, sampling_params: dict[str, Any]) -> Any:
        self.asked.append(sampling_params)
        window = sampling_params["window"]
        steps = [] if window is None else list(range(window[0], sum(window)))
        return SimpleNamespace(
            token_ids=steps,
            log_probs=[-1.0] * len(steps),
            extra_fields={
                "latents": LATENTS,
                "picture": np.zeros((3, 2, 2), np.uint8),
                "conditions": {"pooled_projections": np.ones(3, np.float32)},
                "version_spans": [[7, 0]],
            },
        )


def loop_of(
    module: ModuleType, client: Any, seed: int = 1, *, at_once: bool = True, kept_pictures: int = 0
) -> Any:
    made = object.__new__(module.DiffusionLoop)
    denoising = {"sde_window_size": 3, "sde_window_range": [0, 5], "height": 16, "width": 16}
    made.config = OmegaConf.create(
        {"actor_rollout_ref": {"model": {"denoising": denoising}}, "data": {"seed": seed}}
    )
    OmegaConf.update(made.config, f"{OWN}.reward.while_generating", at_once, force_add=True)
    OmegaConf.update(made.config, f"{OWN}.diffusion.kept_pictures", kept_pictures, force_add=True)
    made.rollout_config = SimpleNamespace(prompt_length=8)
    made.server_manager = client
    made.tokenizer = lambda text: {"input_ids": [len(word) for word in text.split()]}
    made._begin()
    return made
