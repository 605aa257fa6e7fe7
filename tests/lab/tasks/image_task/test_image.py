# SPDX-License-Identifier: Apache-2.0
"""Twelve scenes, each as often as the others, and pictures that are wrong as often as they should be."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from recipe.async_pipeline.errors import ConfigError
from recipe.async_pipeline.lab.tasks.image_task.image import SCENES, SIDE, WORDS, ImageTask, Scene, image_rows


def test_a_scene_has_a_prompt_an_answer_and_a_corner() -> None:
    scene = Scene(1, 2)
    assert (scene.prompt, scene.answer) == ("green square bottom left", "green bottom left")
    assert scene.corner == (SIDE // 2, 0)
    assert Scene(0, 1).corner == (0, SIDE // 2)


def test_every_word_of_a_prompt_is_known() -> None:
    assert {word for scene in SCENES for word in scene.prompt.split()} == set(WORDS)
    assert len({scene.prompt for scene in SCENES}) == len(SCENES) == 12


def test_each_scene_is_in_every_round_of_the_training_data() -> None:
    train, val = ImageTask(rounds=3).scenes(0)
    assert set(Counter(train).values()) == {3} and len(train) == 36
    assert set(train[:12]) == set(train[12:24]) == set(val) == set(SCENES)
    assert train != ImageTask(rounds=3).scenes(1)[0]


def test_pictures_are_right_as_often_as_they_should_be() -> None:
    """A random colour is right with chance 1/3, a random quarter with 1/4."""
    rng, task, scene = random.Random(0), ImageTask(right=0.4), Scene(2, 3)
    shown = [task.shown(scene, rng) for _ in range(4000)]
    colours = sum(one.colour == 2 for one in shown) / len(shown)
    quarters = sum(one.quarter == 3 for one in shown) / len(shown)
    assert colours == pytest.approx(0.4 + 0.6 / 3, abs=0.03)
    assert quarters == pytest.approx(0.4 + 0.6 / 4, abs=0.03)
    assert {task.shown(scene, rng) for _ in range(2000)} == set(SCENES)


def test_a_row_has_verl_s_columns() -> None:
    (row,) = image_rows([Scene(0, 0)], "train")
    assert row["prompt"] == [{"role": "user", "content": "red square top left"}]
    assert row["reward_model"]["ground_truth"] == "red top left"
    assert row["extra_info"] == {"index": 0, "split": "train"}


@pytest.mark.parametrize("change", [{"rounds": 0}, {"right": 0.0}, {"right": 1.1}])
def test_parameters_out_of_range_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"task {next(iter(change))} must be"):
        ImageTask(**change)  # type: ignore[arg-type]
