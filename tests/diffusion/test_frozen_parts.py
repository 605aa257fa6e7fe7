# SPDX-License-Identifier: Apache-2.0
"""Prompts become conditions and latents pictures, each as if it were alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from recipe.async_pipeline.diffusion.families import EMPTY
from recipe.async_pipeline.diffusion.model_folder import FrozenParts, ModelFolder, as_picture

pytestmark = pytest.mark.real_engine


@pytest.fixture(scope="module")
def frozen() -> FrozenParts:
    pytest.importorskip("diffusers")
    from recipe.async_pipeline.lab.tasks.image_task.image import WORDS
    from recipe.async_pipeline.lab.tasks.image_task.image_model import (
        MAX_TOKENS,
        ImageModelSpec,
        make_pipeline,
    )

    spec = ImageModelSpec(num_layers=1, num_heads=2, text_size=16)
    return FrozenParts(make_pipeline(spec, WORDS, 0), MAX_TOKENS)


def test_values_become_bytes() -> None:
    found = as_picture(torch.tensor([-2.0, -1.0, 0.0, 1.0, 3.0]))
    assert found.tolist() == [0, 0, 128, 255, 255] and found.dtype == torch.uint8


def test_a_prompt_has_the_same_conditions_in_any_list(frozen: Any) -> None:
    first, second = frozen.encode(["red square top left", "blue square bottom right"])
    (alone,) = frozen.encode(["blue square bottom right"])
    assert first.keys() == {"encoder_hidden_states", "pooled_projections"}
    for name, value in second.items():
        assert torch.equal(value, alone[name]) and not torch.equal(value, first[name])
        assert value.device.type == "cpu" and not value.requires_grad


def test_the_empty_prompt_comes_along_if_it_is_wanted(frozen: Any) -> None:
    prompt = "red square top left"
    plain, empty = frozen.encode([prompt, ""])
    (found,) = frozen.encode([prompt], with_empty=True)
    assert found.keys() == {*plain, *(EMPTY + name for name in empty)}
    for name in plain:
        assert torch.equal(found[name], plain[name]) and torch.equal(found[EMPTY + name], empty[name])


def test_latents_become_pictures(frozen: Any) -> None:
    latents = torch.randn(3, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    pictures = frozen.decode(latents)
    assert pictures.shape == (3, 3, 16, 16) and pictures.dtype == torch.uint8
    scaled = frozen.pipeline.vae.config.scaling_factor
    frozen.pipeline.vae.register_to_config(scaling_factor=2 * scaled)
    try:
        assert torch.equal(frozen.decode(2 * latents), pictures), "the VAE's scale is taken back"
    finally:
        frozen.pipeline.vae.register_to_config(scaling_factor=scaled)


def test_the_parts_are_not_trained(frozen: Any) -> None:
    for part in ("vae", "text_encoder", "text_encoder_2", "text_encoder_3"):
        module = getattr(frozen.pipeline, part)
        assert not module.training and not any(one.requires_grad for one in module.parameters())


def test_pictures_are_decoded_in_float32(frozen: Any, tmp_path: Path) -> None:
    frozen.pipeline.save_pretrained(tmp_path)
    loaded = FrozenParts.load(ModelFolder(tmp_path), dtype=torch.bfloat16).pipeline
    assert (loaded.vae.dtype, loaded.text_encoder.dtype) == (torch.float32, torch.bfloat16)
