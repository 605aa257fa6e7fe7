# SPDX-License-Identifier: Apache-2.0
"""A pipeline folder tells the family, the sizes and the schedule; what is no pipeline is one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipe.async_pipeline.diffusion.families import Flux, StableDiffusion3
from recipe.async_pipeline.diffusion.model_folder import ModelFolder
from recipe.async_pipeline.errors import ConfigError

SD3 = {
    "model_index.json": {"_class_name": "StableDiffusion3Pipeline"},
    "transformer/config.json": {"in_channels": 16, "patch_size": 2},
    "scheduler/scheduler_config.json": {"shift": 3.0, "num_train_timesteps": 1000},
    "vae/config.json": {"block_out_channels": [128, 256, 512, 512]},
}
FLUX = {
    "model_index.json": {"_class_name": "FluxPipeline"},
    "transformer/config.json": {"in_channels": 64, "patch_size": 1},
    "scheduler/scheduler_config.json": {"use_dynamic_shifting": True},
    "vae/config.json": {"block_out_channels": [128, 256, 512, 512]},
}


def written(path: Path, files: dict[str, Any]) -> Path:
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_stable_diffusion(tmp_path: Path) -> None:
    folder = ModelFolder(written(tmp_path, SD3))
    assert isinstance(folder.family, StableDiffusion3)
    assert folder.latent_shape(512, 768) == (16, 64, 96)
    assert folder.schedule(28, 512, 512).num_steps == 28
    assert folder.transformer == tmp_path / "transformer"


def test_flux_has_four_times_the_channels_in_its_sequence(tmp_path: Path) -> None:
    folder = ModelFolder(written(tmp_path, FLUX))
    assert isinstance(folder.family, Flux)
    assert folder.latent_shape(512, 512) == (16, 64, 64)
    small, large = (float(folder.schedule(4, side, side).sigmas[1]) for side in (256, 1024))
    assert small < large, "larger images are sampled with more noise"


@pytest.mark.parametrize("size", [(512, 520), (8, 512), (0, 512)])
def test_an_image_consists_of_whole_patches(tmp_path: Path, size: tuple[int, int]) -> None:
    folder = ModelFolder(written(tmp_path, SD3))
    with pytest.raises(ConfigError, match=f"must be multiples of 16, got {size[0]} x {size[1]}"):
        folder.latent_shape(*size)


@pytest.mark.parametrize(
    ("files", "error"),
    [
        ({}, r"is no pipeline of diffusers: model_index.json cannot be read \(FileNotFoundError\)"),
        ({"model_index.json": "{"}, r"cannot be read \(JSONDecodeError\)"),
        ({"model_index.json": [1]}, "holds no JSON object"),
        ({"model_index.json": {}}, "holds a folder without a class; supported are StableDiffusion3Pipeline"),
        ({"model_index.json": {"_class_name": "WanPipeline"}}, "holds a WanPipeline; supported are"),
    ],
)
def test_what_is_no_supported_pipeline_is_refused(tmp_path: Path, files: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        ModelFolder(written(tmp_path, files))


def test_a_missing_part_is_named_when_it_is_needed(tmp_path: Path) -> None:
    folder = ModelFolder(written(tmp_path, {k: v for k, v in SD3.items() if "vae" not in k}))
    with pytest.raises(ConfigError, match="vae/config.json cannot be read"):
        folder.latent_shape(512, 512)
