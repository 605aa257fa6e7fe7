# SPDX-License-Identifier: Apache-2.0
"""The knobs of image policies say which steps have noise."""

from __future__ import annotations

from typing import Any

import pytest

from recipe.async_pipeline.config.schema import AsyncPipelineConfig
from recipe.async_pipeline.errors import ConfigError


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


@pytest.mark.parametrize("name", ["sde_window_first", "sde_window_end"])
def test_bounds_of_a_window_need_its_size(name: str) -> None:
    with pytest.raises(ConfigError, match=f"diffusion.{name}=2 requires .*sde_window_size; set it"):
        AsyncPipelineConfig.of({"diffusion": {name: 2}})


@pytest.mark.parametrize(
    ("knobs", "error"),
    [
        ({"sde_type": "ode"}, "sde_type must be one of sde, cps, dance_sde, got 'ode'"),
        ({"noise_level": 0}, "noise_level must be > 0, got 0; 0.7 is usual for sde, 0.8 for cps"),
        ({"num_inference_steps": 0}, "num_inference_steps must be >= 1, got 0"),
        ({"height": 7.5}, "height must be a whole number, got 7.5"),
    ],
)
def test_wrong_values_are_refused(knobs: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=f"diffusion.{error}"):
        AsyncPipelineConfig.of({"diffusion": knobs})
