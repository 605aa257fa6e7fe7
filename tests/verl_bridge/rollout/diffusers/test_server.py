# SPDX-License-Identifier: Apache-2.0
"""The server of images: what it keeps of prompts, and what it returns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from recipe.async_pipeline.diffusion.families import EMPTY
from recipe.async_pipeline.verl_bridge.rollout.diffusers.fields import (
    CONDITIONS,
    IMAGE,
    LATENTS,
    PICTURE,
    WANTED,
)
from tests.fakes.tiny_flow import SHAPE, schedule

pytestmark = pytest.mark.real_engine


class Encoder:
    """Notes what it encodes: as many bytes as the prompt has characters, and the empty prompt's."""

    def __init__(self) -> None:
        self.encoded: list[str] = []

    def encode(self, prompts: Sequence[str], *, with_empty: bool) -> list[dict[str, torch.Tensor]]:
        assert with_empty
        self.encoded += prompts
        empty = torch.zeros(1000, dtype=torch.uint8)
        return [
            {"states": torch.zeros(len(one), dtype=torch.uint8), f"{EMPTY}states": empty} for one in prompts
        ]


class Drawing:
    """Draws an image at once."""

    async def generate(self, request: Any) -> AsyncIterator[Any]:
        assert request.sampling.shape == SHAPE
        sample = SimpleNamespace(steps=(1,), log_probs=torch.zeros(1), latents=torch.zeros(2, *SHAPE))
        yield SimpleNamespace(sample=sample, picture=torch.zeros(3, 4, 4, dtype=torch.uint8))


def server_of(module: ModuleType) -> tuple[Any, Encoder]:
    server, encoder = module.ImageServer(None, None, 0, 0), Encoder()
    server._frozen, server._versioned = encoder, Drawing()
    server._model = SimpleNamespace(
        denoising=SimpleNamespace(guidance_scale=4.0, height=32, width=32),
        validation_schedule=schedule(),
        folder=SimpleNamespace(
            family=SimpleNamespace(guides_by_empty_prompt=lambda scale: scale is not None),
            latent_shape=lambda height, width: SHAPE,
        ),
    )
    return server, encoder


async def ask(server: Any, prompt: str, *wanted: str) -> dict[str, Any]:
    params = {"prompt": prompt, WANTED: wanted, "seed": 0, "window": None}
    answer = await server.generate([], params, "r")
    fields: dict[str, Any] = answer.extra_fields
    return fields


def test_conditions_of_recent_prompts_are_kept_up_to_a_number_of_bytes(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The empty prompt's are the same tensors for all prompts, and do not count."""
    monkeypatch.setattr(module, "KEPT_BYTES", 100)
    server, encoder = server_of(module)
    first, second, third, large = "a" * 40, "b" * 40, "c" * 40, "d" * 101

    async def play() -> None:
        for prompt in (first, second, first, third, first, second, large, large):
            conditions = (await ask(server, prompt, CONDITIONS))[CONDITIONS]
            assert conditions["states"].nbytes == len(prompt)

    asyncio.run(play())
    assert encoder.encoded == [first, second, third, second, large, large]


@pytest.mark.parametrize(
    ("wanted", "fields"),
    [
        ((IMAGE,), {LATENTS, PICTURE}),
        ((CONDITIONS,), {CONDITIONS}),
        ((IMAGE, CONDITIONS), {LATENTS, PICTURE, CONDITIONS}),
    ],
)
def test_an_answer_has_conditions_only_if_they_are_wanted(
    module: ModuleType, wanted: tuple[str, ...], fields: set[str]
) -> None:
    """Conditions are large, so one image of each prompt asks for them."""
    server, _ = server_of(module)
    assert set(asyncio.run(ask(server, "a", *wanted))) == fields
