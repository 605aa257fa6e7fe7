# SPDX-License-Identifier: Apache-2.0
"""settings.json has the knobs by their paths."""

from __future__ import annotations

import pytest

from recipe.async_pipeline.config.derived.settings_file import PATHS, as_settings, of_settings
from recipe.async_pipeline.config.knobs.schema import AsyncPipelineConfig, knob_paths


def test_every_entry_is_a_knob() -> None:
    assert {*PATHS} <= {*knob_paths()}
    assert tuple(as_settings(AsyncPipelineConfig(), None)) == PATHS


@pytest.mark.parametrize("straggler", ["wait", "regenerate", "drop", "mask"])
def test_it_is_read_as_it_was_written(straggler: str) -> None:
    knobs = AsyncPipelineConfig.of(
        {
            "strategy": "n_step_ahead",
            "staleness.max_lag": 3,
            "staleness.depth": 2,
            "staleness.straggler": straggler,
            "weight_sync.every": 2,
        }
    )
    assert of_settings(as_settings(knobs, None)) == knobs
    assert as_settings(knobs, None)["staleness.straggler"] == straggler
    assert of_settings(as_settings(knobs, "trainer")).training.old_logp == "trainer"
