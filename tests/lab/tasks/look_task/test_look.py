# SPDX-License-Identifier: Apache-2.0
"""Pictures show what their answers say, no two are the same, and files of them are read again."""

from __future__ import annotations

import io
import random
from collections import Counter
from typing import Any

import pytest

from recipe.async_pipeline.errors import ConfigError
from recipe.async_pipeline.lab.tasks.look_task.look import (
    CELL,
    COLOURS,
    COUNTS,
    QUESTION,
    SHAPES,
    Look,
    LookTask,
    careless_answer,
    look_rows,
)

Image = pytest.importorskip("PIL.Image")
SMALL = LookTask(num_train=40, num_val=8)


def inked(picture: Any, cell: int, columns: int) -> int:
    """Return how many pixels of a cell have no shade of grey."""
    left, top = cell % columns * CELL, cell // columns * CELL
    pixels = picture.crop((left, top, left + CELL, top + CELL)).tobytes()
    return sum(len(set(pixels[at : at + 3])) > 1 for at in range(0, len(pixels), 3))


@pytest.mark.parametrize("columns", [2, 4, 6])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("colour", COLOURS)
def test_a_picture_shows_its_objects_and_nothing_else(colour: str, shape: str, columns: int) -> None:
    look = Look(colour, shape, cells=(0, 3, 7), shade=9, rows=4, columns=columns)
    picture = look.draw()
    assert picture.size == (columns * CELL, 4 * CELL)
    found = [cell for cell in range(4 * columns) if inked(picture, cell, columns)]
    assert found == [0, 3, 7] and look.answer == f"3 {colour} {shape}"
    assert {colour for _, colour in picture.getcolors(4096) or ()} == {COLOURS[colour], (9, 9, 9)}


def test_shapes_differ_in_what_they_cover() -> None:
    covered = [inked(Look("red", shape, (0,), 0).draw(), 0, 4) for shape in SHAPES]
    assert len(set(covered)) == len(SHAPES)


def test_pictures_are_drawn_by_the_seed_and_held_out_ones_are_not_trained() -> None:
    train, val = SMALL.pictures(3)
    assert (len(train), len(val)) == (40, 8)
    assert len({*train, *val}) == 48
    assert SMALL.pictures(3) == (train, val) != SMALL.pictures(4)
    assert {len(look.cells) for look in train} == set(COUNTS)


def test_each_word_of_an_answer_slips_by_itself() -> None:
    look, rng = Look("red", "box", (1, 2), 0), random.Random(0)
    assert careless_answer(look, rng, 0.0) == "2 red box"
    words = Counter(word for _ in range(900) for word in careless_answer(look, rng, 1.0).split())
    assert set(words) == {*map(str, COUNTS), *COLOURS, *SHAPES}
    assert all(240 < count < 360 for count in words.values())


def test_a_row_has_the_picture_as_a_file_and_its_place_in_the_question() -> None:
    look = Look("blue", "disc", (5,), 20)
    (row,) = look_rows([look], "val")
    assert row["prompt"] == [{"role": "user", "content": QUESTION}] and QUESTION.count("<image>") == 1
    assert row["reward_model"]["ground_truth"] == "1 blue disc"
    (image,) = row["images"]
    assert Image.open(io.BytesIO(image["bytes"])).tobytes() == look.draw().tobytes()


@pytest.mark.parametrize("wrong", [{"rows": 3}, {"columns": 0}, {"rows": 5, "columns": 5}])
def test_four_patches_are_one_token(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="task rows and columns must be even"):
        LookTask(**wrong)
