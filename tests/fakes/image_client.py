# SPDX-License-Identifier: Apache-2.0
"""A server that draws every image at once, and the agent loop `diffusion` with it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf

from recipe.async_pipeline.config.paths import OWN, nested

LATENTS = np.arange(4 * 2, dtype=np.float32).reshape(4, 2, 1, 1)
ROW = {
    "raw_prompt": [{"role": "user", "content": "red square"}],
    "global_steps": 3,
    "index": 5,
    "uid": "a",
    "session_id": 0,
}


class Client:
    """A server that draws every request."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    async def generate(self, request_id: str, *, prompt_ids: Any, sampling_params: dict[str, Any]) -> Any:
        self.asked.append(sampling_params)
        conditions = {"conditions": {"pooled_projections": torch.ones(3)}}
        conditions = conditions if "conditions" in sampling_params["wanted"] else {}
        if "image" not in sampling_params["wanted"]:
            return SimpleNamespace(token_ids=[], log_probs=[], extra_fields=conditions)
        window = sampling_params["window"]
        steps = [] if window is None else list(range(window[0], sum(window)))
        return SimpleNamespace(
            token_ids=steps,
            log_probs=[-1.0] * len(steps),
            extra_fields={
                "latents": LATENTS,
                "picture": np.zeros((3, 2, 2), np.uint8),
                "version_spans": [[7, 0]],
                **conditions,
            },
        )


class Tokenizer:
    """Has a token for each word, its length."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [len(word) for word in text.split()]}


def draw(loop: Any, client: Client, row: dict[str, Any], **settings: Any) -> Any:
    """Return what `response_of` returns."""
    return asyncio.run(response_of(loop, client, row, **settings))


async def response_of(
    loop: Any, client: Client, row: dict[str, Any], *, seed: int = 1, at_once: bool = True
) -> Any:
    """Return what an agent loop of this class returns for a row."""
    denoising = {"sde_window_size": 3, "sde_window_range": [0, 5], "height": 16, "width": 16}
    own = {"reward": {"while_generating": at_once}}
    actor = {"rollout": {"prompt_length": 8}, "model": {"denoising": denoising}}
    config = OmegaConf.create({"actor_rollout_ref": actor, "data": {"seed": seed}, **nested({OWN: own})})
    data = SimpleNamespace(config=config.data)
    made = loop(SimpleNamespace(config=config), client, Tokenizer(), None, None, data)
    return await made.run({}, **row)
