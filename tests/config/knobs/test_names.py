# SPDX-License-Identifier: Apache-2.0
"""Unknown names are errors with the nearest knobs."""

from __future__ import annotations

from typing import Any

import pytest

from recipe.async_pipeline.config.keys.misplaced import unknown_key
from recipe.async_pipeline.config.knobs.names import flattened, unknown
from recipe.async_pipeline.config.knobs.schema import AsyncPipelineConfig, knob_paths
from recipe.async_pipeline.config.paths import OWN
from recipe.async_pipeline.errors import ConfigError


def test_an_argument_that_the_config_lacks_is_no_unknown_key() -> None:
    path = f"{OWN}.agentic.environment_kwargs.size"
    assert (
        unknown_key(path) == f"{path} is a knob that this config does not have; write +{path}=... to add it"
    )


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("max_lagg", "staleness.max_lag"),
        ("max_lag", "staleness.max_lag"),
        ("every", "weight_sync.every"),
        ("weight_sync.max_lag", "staleness.max_lag"),
        ("staleness.wait_timeout", "faults.wait_timeout_s"),
        ("weight_sync.in_flight", "weight_sync.in_flight_policy"),
        ("weight_sync.evry", "weight_sync.every"),
        ("faults.bad_data.empty_answers", "faults.bad_data.empty_answer"),
        ("agentic.environment_kwarg.size", "agentic.environment_kwargs"),
    ],
)
def test_an_unknown_name_gets_the_three_nearest_knobs(path: str, nearest: str) -> None:
    text = unknown(AsyncPipelineConfig, path, ", got 1")
    assert text.startswith(f"{OWN}.{path} is unknown, got 1; nearest knobs: {nearest}, ")
    assert text.endswith("; `async-pipeline explain --knobs` lists all")
    near = text.partition("; nearest knobs: ")[2].partition(";")[0].split(", ")
    assert len(near) == 3 and {*near} <= {*knob_paths()}


def test_sections_become_paths() -> None:
    own: dict[str, Any] = {
        "run_dir": "x",
        "staleness": {"max_lag": 2},
        "reward": None,
        "faults": {"bad_data": {"all_masked": "keep"}},
        "pools": {"a": {"devices": 1}},
    }
    assert flattened(AsyncPipelineConfig, own) == {
        "run_dir": "x",
        "staleness.max_lag": 2,
        "faults.bad_data.all_masked": "keep",
        "pools": {"a": {"devices": 1}},
    }


@pytest.mark.parametrize("value", [3, "x", [1], True])
def test_a_section_must_be_a_mapping(value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        flattened(AsyncPipelineConfig, {"reward": value})
    assert str(caught.value).startswith(
        f"{OWN}.reward must be a section, got {value!r}; set one of its knobs: "
    )
