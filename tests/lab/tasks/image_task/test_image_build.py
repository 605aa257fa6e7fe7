# SPDX-License-Identifier: Apache-2.0
"""The directory of the image task: a pipeline that the library loads, made once, and scored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recipe.async_pipeline.errors import WarmupFailed
from recipe.async_pipeline.lab.tasks.build import ToySpec, ensure_toy
from recipe.async_pipeline.lab.tasks.image_task.image import SCENES, ImageTask
from recipe.async_pipeline.lab.tasks.image_task.image_build import ImageSpec
from recipe.async_pipeline.lab.tasks.image_task.image_model import MAX_TOKENS, FluxModelSpec, ImageModelSpec
from recipe.async_pipeline.lab.tasks.image_task.image_warmup import ImageWarmupSpec

SMALL: dict[str, Any] = {
    "vae_steps": 2,
    "flow_steps": 2,
    "batch_size": 8,
    "num_checked": 1,
    "max_vae_error": 9.0,
}


def small(model: type[ImageModelSpec] = ImageModelSpec, **changes: Any) -> ImageSpec:
    return ImageSpec(
        model=model(num_layers=1, num_heads=2, text_size=16),
        task=ImageTask(rounds=2),
        warmup=ImageWarmupSpec(**{**SMALL, "num_sampling_steps": 3, "min_score": 0.0, **changes}),
    )


def test_other_parameters_make_another_directory() -> None:
    flux = ImageSpec(model=FluxModelSpec())
    specs = (ImageSpec(), flux, ImageSpec(seed=1), ImageSpec(task=ImageTask(right=0.5)), small(), ToySpec())
    assert len({spec.dir_name for spec in specs}) == 6
    assert ImageSpec().dir_name.startswith("image-sd3-16px-seed0-")
    assert flux.dir_name.startswith("image-flux-16px-seed0-")


@pytest.mark.real_engine
@pytest.mark.parametrize(
    ("model", "states"), [(ImageModelSpec, 2 * MAX_TOKENS), (FluxModelSpec, MAX_TOKENS)], ids=["sd3", "flux"]
)
def test_it_is_made_once_and_every_part_is_read_again(
    tmp_path: Path, model: type[ImageModelSpec], states: int
) -> None:
    """`states`: SD3 puts the states of its CLIP towers in front of T5's, FLUX has T5's alone."""
    pytest.importorskip("diffusers")
    import pyarrow.parquet
    import torch

    from recipe.async_pipeline.diffusion.model_folder import FrozenParts, ModelFolder

    said: list[str] = []
    made = ensure_toy(small(model), tmp_path, report=said.append)
    paths = made.as_dict()
    assert pyarrow.parquet.read_table(paths["train"]).num_rows == 24
    assert pyarrow.parquet.read_table(paths["val"]).num_rows == 12
    assert Path(str(paths["reward"])).name == "image_reward.py"
    count = len(said)
    assert ensure_toy(small(model), tmp_path, report=said.append) == made and len(said) == count

    folder = ModelFolder(str(paths["model"]))
    assert folder.latent_shape(16, 16) == (4, 8, 8)
    frozen = FrozenParts.load(folder, max_sequence_length=MAX_TOKENS)
    conditions = frozen.encode([scene.prompt for scene in SCENES])
    assert conditions[0]["encoder_hidden_states"].shape == (states, 32)
    pooled = torch.stack([one["pooled_projections"] for one in conditions])
    assert float(torch.pdist(pooled).min()) > 0.01, "the towers tell all prompts apart"
    pictures = frozen.decode(torch.zeros(2, 4, 8, 8))
    assert pictures.shape == (2, 3, 16, 16) and pictures.dtype == torch.uint8


@pytest.mark.real_engine
@pytest.mark.parametrize(
    ("change", "error"),
    [({"max_vae_error": 0.0}, "raise warmup vae_steps"), ({"min_score": 1.0}, "raise warmup flow_steps")],
)
def test_a_warm_up_that_fails_leaves_nothing(tmp_path: Path, change: dict[str, Any], error: str) -> None:
    pytest.importorskip("diffusers")
    with pytest.raises(WarmupFailed, match=error):
        ensure_toy(small(**change), tmp_path, report=lambda _: None)
    assert list(tmp_path.iterdir()) == []
