# SPDX-License-Identifier: Apache-2.0
"""The pictures: a square of one colour in one quarter, and prompts that name both. Pure: no tensors."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from recipe.async_pipeline.errors import ConfigError

COLOURS = ("red", "green", "blue")
"""In the order of the channels."""
ROWS, COLUMNS = ("top", "bottom"), ("left", "right")
SIDE = 16
"""Height and width of a picture, in pixels."""
DATA_SOURCE = "async_pipeline/image"


@dataclass(frozen=True, order=True)
class Scene:
    """What a prompt asks for, by index: a colour, and a quarter in reading order."""

    colour: int
    quarter: int

    @property
    def corner(self) -> tuple[int, int]:
        """Row and column of the quarter's first pixel."""
        return self.quarter // 2 * (SIDE // 2), self.quarter % 2 * (SIDE // 2)

    @property
    def answer(self) -> str:
        """The ground truth, for example `red top left`."""
        return f"{COLOURS[self.colour]} {ROWS[self.quarter // 2]} {COLUMNS[self.quarter % 2]}"

    @property
    def prompt(self) -> str:
        """The prompt that the text encoders read, for example `red square top left`."""
        colour, place = self.answer.split(" ", 1)
        return f"{colour} square {place}"


SCENES = tuple(Scene(colour, quarter) for colour in range(3) for quarter in range(4))
WORDS = ("square", *COLOURS, *ROWS, *COLUMNS)
"""Every word of a prompt."""


@dataclass(frozen=True, kw_only=True)
class ImageTask:
    """How often each scene is in the data, and how wrong the pictures are that the warm-up shows."""

    rounds: int = 40
    """Times that every scene is in the training data, in an order that the seed decides."""

    right: float = 0.35
    """Chance that a picture of the warm-up has the colour that its prompt names, and the same for the
    quarter; otherwise it is any. RL has to learn what the prompt means.
    """

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ConfigError(f"task rounds must be >= 1, got {self.rounds}")
        if not 0 < self.right <= 1:
            raise ConfigError(f"task right must be in (0, 1], got {self.right}")

    def scenes(self, seed: int) -> tuple[list[Scene], list[Scene]]:
        """Return the scenes of the training rows and of the validation rows.

        Held-out scenes would ask for words that the text encoders have not seen, so validation has all scenes
        too, and is sampled with other noise.
        """
        rng = random.Random(seed)
        train = [scene for _ in range(self.rounds) for scene in rng.sample(SCENES, len(SCENES))]
        return train, list(SCENES)

    def shown(self, scene: Scene, rng: random.Random) -> Scene:
        """Return the scene that the warm-up shows for a prompt."""
        colour = scene.colour if rng.random() < self.right else rng.randrange(3)
        quarter = scene.quarter if rng.random() < self.right else rng.randrange(4)
        return Scene(colour, quarter)


def image_rows(scenes: Sequence[Scene], split_name: str) -> list[dict[str, Any]]:
    """Return a row of each scene, in verl's columns."""
    return [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": scene.prompt}],
            "ability": "image",
            "reward_model": {"style": "rule", "ground_truth": scene.answer},
            "extra_info": {"index": index, "split": split_name},
        }
        for index, scene in enumerate(scenes)
    ]
