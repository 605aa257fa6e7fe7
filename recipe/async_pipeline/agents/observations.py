# SPDX-License-Identifier: Apache-2.0
"""What an environment shows: a text, or texts and pictures in the order in which the policy reads them."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

from ..errors import EnvironmentFailed

Observation = str | Sequence[str | bytes]
"""A picture is the file of an image, for example a PNG; see `png`."""
PICTURE = "picture"


def png(image: Any) -> bytes:
    """Return the file of a picture.

    `image`: an image of Pillow, or an array of 8-bit numbers with the shape (height, width, 3).
    """
    from PIL import Image

    shown = image if isinstance(image, Image.Image) else Image.fromarray(image)
    file = io.BytesIO()
    shown.save(file, "PNG")
    return file.getvalue()


def squares(colours: Sequence[Sequence[str]], side: int) -> bytes:
    """Return the picture of a board, with a square of so many pixels for each colour."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (side * len(colours[0]), side * len(colours)))
    draw = ImageDraw.Draw(image)
    for down, row in enumerate(colours):
        for right, colour in enumerate(row):
            left, top = side * right, side * down
            draw.rectangle((left, top, left + side - 1, top + side - 1), fill=colour, outline="grey")
    return png(image)


def checked_observation(found: Any) -> Observation:
    """Return what an environment showed. Raises EnvironmentFailed if it is no observation."""
    if isinstance(found, str):
        return found
    if isinstance(found, list | tuple) and found and all(isinstance(one, str | bytes) for one in found):
        return found
    raise EnvironmentFailed(
        f"an observation must be a text, or a list of texts and of files of pictures, got {found!r}"[:500]
    )


def to_json(observation: Observation) -> Any:
    """Return an observation as a value of JSON."""
    if isinstance(observation, str):
        return observation
    return [one if isinstance(one, str) else {PICTURE: base64.b64encode(one).decode()} for one in observation]


def of_json(value: Any) -> Observation:
    """Return the observation that `to_json` wrote."""
    if isinstance(value, str):
        return value
    return [one if isinstance(one, str) else base64.b64decode(one[PICTURE]) for one in value]
