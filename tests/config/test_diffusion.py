# SPDX-License-Identifier: Apache-2.0
"""The knobs of image policies say which steps have noise."""

from __future__ import annotations

from typing import Any

import pytest

from recipe.async_pipeline.config.schema import AsyncPipelineConfig


@pytest.mark.parametrize(
    ("knobs", "size", "within"),
    [
        ({}, None, None),
        ({"sde_window_size": 3}, 3, [0, 9]),
        ({"sde_window_size": 3, "sde_window_end": 5}, 3, [0, 5]),
        ({"sde_window_size": 2, "sde_window_first": 1, "num_inference_steps": 4}, 2, [1, 3]),
    ],
)
def test_a_window_is_before_the_last_step(knobs: dict[str, Any], size: int | None, within: Any) -> None:
    found = AsyncPipelineConfig.of({"diffusion": knobs}).diffusion.denoising()
    assert (found["sde_window_size"], found["sde_window_range"]) == (size, within)
