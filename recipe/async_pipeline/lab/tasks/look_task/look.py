# SPDX-License-Identifier: Apache-2.0
"""Pictures of one to three equal objects; the answer counts them and names their colour and shape.

A picture is a grid of cells, as large as the patches that a vision tower reads. Pure, but for Pillow, which
draws.
"""

from __future__ import annotations

import io
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from recipe.async_pipeline.errors import ConfigError

if TYPE_CHECKING:
    from PIL.Image import Image

COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (60, 80, 230)}
SHAPES = ("box", "disc", "cross")
COUNTS = (1, 2, 3)
CELL = 14
"""Height and width of a cell, in pixels."""
QUESTION = "<image>what?"
"""verl puts a picture in place of `<image>`."""
DATA_SOURCE = "async_pipeline/look"


@dataclass(frozen=True, order=True)
class Look:
    """One picture: what it shows, and where; cells are counted in reading order."""

    colour: str
    shape: str
    cells: tuple[int, ...]
    shade: int
    """Brightness of the background, 0 to 255."""
    rows: int = 4
    columns: int = 4

    @property
    def answer(self) -> str:
        """The correct response, for example `2 red disc`."""
        return f"{len(self.cells)} {self.colour} {self.shape}"

    def draw(self) -> Image:
        """Return the picture."""
        from PIL import Image, ImageDraw

        size = (self.columns * CELL, self.rows * CELL)
        picture = Image.new("RGB", size, (self.shade, self.shade, self.shade))
        pen, ink = ImageDraw.Draw(picture), COLOURS[self.colour]
        for cell in self.cells:
            left, top = cell % self.columns * CELL + 1, cell // self.columns * CELL + 1
            right, bottom = left + CELL - 3, top + CELL - 3
            if self.shape == "box":
                pen.rectangle((left, top, right, bottom), fill=ink)
            elif self.shape == "disc":
                pen.ellipse((left, top, right, bottom), fill=ink)
            else:
                pen.line((left, top, right, bottom), fill=ink, width=3)
                pen.line((left, bottom, right, top), fill=ink, width=3)
        return picture

    def png(self) -> bytes:
        """Return the picture as a PNG file."""
        file = io.BytesIO()
        self.draw().save(file, "PNG")
        return file.getvalue()


@dataclass(frozen=True, kw_only=True)
class LookTask:
    """The set of pictures."""

    num_train: int = 2048
    num_val: int = 128
    rows: int = 4
    columns: int = 4

    def __post_init__(self) -> None:
        if min(self.rows, self.columns) < 2 or self.rows % 2 or self.columns % 2:
            raise ConfigError(
                f"task rows and columns must be even, as four patches are one token, got {self.rows} and "
                f"{self.columns}"
            )

    def pictures(self, seed: int) -> tuple[list[Look], list[Look]]:
        """Return pictures to train on and held-out ones, none in both."""
        rng = random.Random(seed)
        found: dict[Look, None] = {}
        while len(found) < self.num_train + self.num_val:
            found.setdefault(self._any(rng))
        every = list(found)
        return every[self.num_val :], every[: self.num_val]

    def _any(self, rng: random.Random) -> Look:
        cells = rng.sample(range(self.rows * self.columns), rng.choice(COUNTS))
        return Look(
            colour=rng.choice(list(COLOURS)),
            shape=rng.choice(SHAPES),
            cells=tuple(sorted(cells)),
            shade=rng.randrange(0, 32),
            rows=self.rows,
            columns=self.columns,
        )


def careless_answer(picture: Look, rng: random.Random, slip_rate: float) -> str:
    """Return the answer with each word replaced by a random one of its kind with probability `slip_rate`."""
    kinds = (tuple(map(str, COUNTS)), tuple(COLOURS), SHAPES)
    return " ".join(
        rng.choice(kind) if rng.random() < slip_rate else word
        for word, kind in zip(picture.answer.split(), kinds, strict=True)
    )


def look_rows(pictures: Sequence[Look], split_name: str) -> list[dict[str, Any]]:
    """Return a row of each picture, in verl's columns."""
    return [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": QUESTION}],
            "images": [{"bytes": picture.png(), "path": None}],
            "ability": "look",
            "reward_model": {"style": "rule", "ground_truth": picture.answer},
            "extra_info": {"index": index, "split": split_name},
        }
        for index, picture in enumerate(pictures)
    ]
