# SPDX-License-Identifier: Apache-2.0
"""settings.json keeps its names and values when knobs are renamed."""

from __future__ import annotations

import pytest

from recipe.async_pipeline.config.schema import AsyncPipelineConfig
from recipe.async_pipeline.config.settings_file import NAMES, as_settings, of_settings

KNOBS = AsyncPipelineConfig.of(
    {
        "strategy": "fully_async",
        "staleness.max_lag": 3,
        "staleness.depth": 2,
        "staleness.oldest_share": 0.5,
        "staleness.straggler": "regenerate",
        "weight_sync.every": 2,
    }
)


def test_the_file_has_the_names_and_values_that_it_always_had() -> None:
    settings = as_settings(KNOBS, "logp_pool")
    assert tuple(settings) == NAMES
    assert settings == {
        "strategy": "fully_async",
        "max_lag": 3,
        "depth": 2,
        "oldest_share": 0.5,
        "stale": "resume",
        "sync_every": 2,
        "ref_refresh_every": 0,
        "old_logp": "logp_pool",
    }


@pytest.mark.parametrize("straggler", ["wait", "regenerate", "drop", "mask"])
def test_it_is_read_as_it_was_written(straggler: str) -> None:
    knobs = AsyncPipelineConfig.of(
        {"strategy": "n_step_ahead", "staleness.max_lag": 2, "staleness.straggler": straggler}
    )
    assert of_settings(as_settings(knobs, None)) == knobs
    older = {name: value for name, value in as_settings(knobs, None).items() if name != "ref_refresh_every"}
    assert of_settings(older) == knobs
    assert of_settings(as_settings(knobs, "trainer")).training.old_logp == "trainer"
