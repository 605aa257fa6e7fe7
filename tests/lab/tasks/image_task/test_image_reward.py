# SPDX-License-Identifier: Apache-2.0
"""Half a point for the colour and half for the place, whatever array type the picture has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from recipe.async_pipeline.lab.tasks.image_task import image, image_reward
from recipe.async_pipeline.lab.tasks.image_task.image import SCENES, Scene
from recipe.async_pipeline.lab.tasks.image_task.image_reward import compute_score


def picture(scene: Scene) -> Any:
    row, column = scene.corner
    found = np.zeros((3, 16, 16), dtype=np.uint8)
    found[scene.colour, row + 1 : row + 7, column + 1 : column + 7] = 255
    return found


@pytest.mark.parametrize("wanted", SCENES, ids=lambda scene: scene.answer)
def test_each_scene_scores_itself_and_no_other(wanted: Scene) -> None:
    for shown in SCENES:
        found = compute_score("image", picture(shown), wanted.answer)
        right = (float(shown.colour == wanted.colour), float(shown.quarter == wanted.quarter))
        assert (found["colour"], found["place"]) == right
        assert found["score"] == sum(right) / 2


def test_tensors_score_as_arrays_do() -> None:
    torch = pytest.importorskip("torch")
    for scene in SCENES:
        shown = picture(scene)
        tensor = torch.from_numpy(shown)
        assert compute_score("", tensor, "red top left") == compute_score("", shown, "red top left")


def test_faint_noise_does_not_count() -> None:
    noise = np.random.default_rng(0).integers(0, 40, (3, 16, 16)).astype(np.uint8)
    shown = np.maximum(picture(Scene(2, 3)), noise)
    assert compute_score("image", shown, "blue bottom right", {"index": 1})["score"] == 1.0


def test_the_rule_and_the_task_have_the_same_words() -> None:
    assert image_reward.COLOURS == image.COLOURS
    assert image_reward.QUARTERS == tuple(Scene(0, quarter).answer.split(" ", 1)[1] for quarter in range(4))
