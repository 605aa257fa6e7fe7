# SPDX-License-Identifier: Apache-2.0
"""The rule that scores one picture by its colour and its place. Loaded by path: no package is imported.

The signature is the one of visual rewards in verl-omni: the picture is uint8 (3, height, width), a numpy
array or a tensor.
"""

from __future__ import annotations

from typing import Any

COLOURS = ("red", "green", "blue")
QUARTERS = ("top left", "top right", "bottom left", "bottom right")


def compute_score(
    data_source: str,
    solution_image: Any,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    **_: Any,
) -> dict[str, float]:
    """Return 1/2 for the colour that dominates the picture, plus 1/2 for its brightest quarter; and both."""
    del data_source, extra_info
    colour, place = ground_truth.split(" ", 1)
    height, width = solution_image.shape[1] // 2, solution_image.shape[2] // 2
    # Python numbers: the sum of a uint8 array would be one of another type than of a tensor.
    channels = [float(channel.sum()) for channel in solution_image]
    quarters = [
        float(solution_image[:, row : row + height, column : column + width].sum())
        for row in (0, height)
        for column in (0, width)
    ]
    right_colour = float(COLOURS[channels.index(max(channels))] == colour)
    right_place = float(QUARTERS[quarters.index(max(quarters))] == place)
    return {"score": (right_colour + right_place) / 2, "colour": right_colour, "place": right_place}
