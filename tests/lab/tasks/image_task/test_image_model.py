# SPDX-License-Identifier: Apache-2.0
"""A pipeline with every part of a real one, the same for the same seed."""

from __future__ import annotations

from typing import Any

import pytest

from recipe.async_pipeline.errors import ConfigError
from recipe.async_pipeline.lab.tasks.image_task.image import SCENES, WORDS
from recipe.async_pipeline.lab.tasks.image_task.image_model import (
    MAX_TOKENS,
    FluxModelSpec,
    ImageModelSpec,
    make_pipeline,
    make_word_tokenizer,
)

SMALL: dict[str, Any] = {"num_layers": 1, "num_heads": 2, "text_size": 16}
ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")


@pytest.mark.parametrize("side", [0, 3, 18])
def test_pictures_consist_of_whole_patches(side: int) -> None:
    with pytest.raises(ConfigError, match=f"model side must be a multiple of 4 pixels, got {side}"):
        ImageModelSpec(side=side)


@pytest.mark.real_engine
def test_flux_gets_its_guidance_as_an_input_and_its_shift_by_the_size_of_the_image() -> None:
    pytest.importorskip("diffusers")
    pipeline = make_pipeline(FluxModelSpec(**SMALL), WORDS, 0)
    assert pipeline.transformer.config.guidance_embeds
    assert pipeline.scheduler.config.use_dynamic_shifting


@pytest.mark.real_engine
def test_each_word_is_a_token() -> None:
    pytest.importorskip("transformers")
    tokenizer = make_word_tokenizer(WORDS)
    ids = {scene: tokenizer(scene.prompt)["input_ids"] for scene in SCENES}
    assert {len(one) for one in ids.values()} == {MAX_TOKENS}
    assert len({tuple(one) for one in ids.values()}) == len(SCENES)
    assert {one[0] for one in ids.values()} == {tokenizer.bos_token_id}
    assert {one[-1] for one in ids.values()} == {tokenizer.eos_token_id}
    asked = [{"role": "user", "content": SCENES[0].prompt}]
    assert tokenizer.apply_chat_template(asked, tokenize=False) == SCENES[0].prompt


@pytest.mark.real_engine
@pytest.mark.parametrize(
    ("spec", "encoders"),
    [(ImageModelSpec(**SMALL), 3), (FluxModelSpec(**SMALL, num_single_layers=1), 2)],
    ids=["sd3", "flux"],
)
def test_weights_follow_from_the_seed_alone(spec: ImageModelSpec, encoders: int) -> None:
    pytest.importorskip("diffusers")
    import torch

    before = torch.random.get_rng_state()
    one, same, other = (make_pipeline(spec, WORDS, seed) for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), before)
    for part in ("transformer", "vae", *ENCODERS[:encoders]):
        weights = [dict(getattr(made, part).named_parameters()) for made in (one, same, other)]
        assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
        assert any(not torch.equal(weights[0][name], weights[2][name]) for name in weights[0])
