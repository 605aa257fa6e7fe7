# SPDX-License-Identifier: Apache-2.0
"""Pictures are painted where their scene says, and a few steps of either training move the right part."""

from __future__ import annotations

import random
from typing import Any

import pytest

from recipe.async_pipeline.errors import ConfigError
from recipe.async_pipeline.lab.tasks.image_task.image import SCENES, SIDE, WORDS, ImageTask, Scene
from recipe.async_pipeline.lab.tasks.image_task.image_model import (
    MAX_TOKENS,
    FluxModelSpec,
    ImageModelSpec,
    make_pipeline,
)
from recipe.async_pipeline.lab.tasks.image_task.image_reward import compute_score
from recipe.async_pipeline.lab.tasks.image_task.image_warmup import (
    SQUARE,
    ImageWarmupSpec,
    paint,
    train_flow,
    train_vae,
)


@pytest.mark.parametrize("name", ["vae_steps", "flow_steps", "batch_size"])
def test_sizes_must_be_positive(name: str) -> None:
    with pytest.raises(ConfigError, match=f"warmup {name} must be >= 1, got 0"):
        ImageWarmupSpec(**{name: 0})


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.answer)
def test_a_painted_scene_scores_itself(scene: Scene) -> None:
    torch = pytest.importorskip("torch")
    picture = paint(scene, random.Random(0))
    assert picture.shape == (3, SIDE, SIDE)
    assert int((picture == 1).sum()) == SQUARE**2 and int((picture == -1).sum()) == 3 * SIDE**2 - SQUARE**2
    shown = ((picture + 1) * 127.5).to(torch.uint8)
    assert compute_score("", shown, scene.answer)["score"] == 1.0


@pytest.fixture(scope="module", params=[ImageModelSpec, FluxModelSpec], ids=lambda spec: spec.family)
def pipeline(request: pytest.FixtureRequest) -> Any:
    pytest.importorskip("diffusers")
    return make_pipeline(request.param(num_layers=1, num_heads=2, text_size=16), WORDS, 0)


@pytest.mark.real_engine
def test_each_part_is_trained_by_its_own_steps(pipeline: Any) -> None:
    import torch

    from recipe.async_pipeline.diffusion.model_folder import FrozenParts

    def weights(part: Any) -> list[Any]:
        return [one.detach().clone() for one in part.parameters()]

    spec, said = ImageWarmupSpec(vae_steps=2, flow_steps=2, batch_size=4, max_vae_error=9.0), list[str]()
    vae, transformer = weights(pipeline.vae), weights(pipeline.transformer)
    error = train_vae(pipeline.vae, spec, seed=0, report=said.append)
    assert error > 0 and pipeline.vae.config.scaling_factor != 1.0
    assert any(not torch.equal(a, b) for a, b in zip(vae, weights(pipeline.vae), strict=True))

    vae = weights(pipeline.vae)
    conditions = FrozenParts(pipeline, MAX_TOKENS).encode([scene.prompt for scene in SCENES])
    train_flow(pipeline, conditions, ImageTask(), spec, seed=0, report=said.append)
    assert all(torch.equal(a, b) for a, b in zip(vae, weights(pipeline.vae), strict=True))
    moved = zip(transformer, weights(pipeline.transformer), strict=True)
    assert any(not torch.equal(a, b) for a, b in moved)
    assert [line.split(":")[0] for line in said] == ["VAE", "transformer"]
