# SPDX-License-Identifier: Apache-2.0
"""Former names are errors that name the current path; unknown names get the nearest knob."""

from __future__ import annotations

from typing import Any

import pytest

from recipe.async_pipeline.config.misplaced import unknown_key
from recipe.async_pipeline.config.names import RENAMED, current_path, flattened, unknown
from recipe.async_pipeline.config.paths import OWN, nested
from recipe.async_pipeline.config.schema import AsyncPipelineConfig, knob_paths
from recipe.async_pipeline.config.translation import resolve
from recipe.async_pipeline.errors import ConfigError


@pytest.mark.parametrize("name", RENAMED)
def test_a_former_flat_name_is_an_error_that_names_the_new_path(name: str) -> None:
    expected = f"{OWN}.{name} is now {OWN}.{RENAMED[name]}; rename it"
    with pytest.raises(ConfigError) as caught:
        resolve(nested({f"{OWN}.{name}": 1}))
    assert str(caught.value).startswith(expected) and "\n" not in str(caught.value)
    assert unknown_key(f"{OWN}.{name}").startswith(expected), "also where hydra refuses the key"


def test_every_new_path_is_a_knob_and_no_old_name_is() -> None:
    sections = {"faults.bad_data"}
    assert {*RENAMED.values()} <= {*knob_paths(), *sections}
    assert not {*RENAMED} & {*knob_paths()}


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("agentic.size", "agentic.environment_kwargs.size"),
        ("agentic.environment_kwarg.size", "agentic.environment_kwargs.size"),
        ("agentic.env_kwargs.map_name", "agentic.environment_kwargs.map_name"),
        ("agentic.kwargs.max_lag", "agentic.environment_kwargs.max_lag"),
        ("agentic.env.HOME", "agentic.agent_env.HOME"),
        ("agentic.end.invalid", "agentic.ends.invalid"),
        ("agentic.gateway.max_turns", "agentic.max_turns"),
    ],
)
def test_arguments_are_sent_to_the_knob_that_takes_them(path: str, meant: str) -> None:
    assert unknown(AsyncPipelineConfig, path).endswith(f"{path} is unknown (did you mean {meant!r}?)")


def test_an_argument_that_the_config_lacks_is_no_unknown_key() -> None:
    path = f"{OWN}.agentic.environment_kwargs.size"
    assert (
        unknown_key(path) == f"{path} is a knob that this config does not have; write +{path}=... to add it"
    )


def test_a_renamed_value_is_named_too() -> None:
    with pytest.raises(ConfigError, match="straggler; rename it; its value resume is now regenerate"):
        resolve(nested({f"{OWN}.stale": "resume"}))


def test_a_kind_of_bad_data_by_its_former_name() -> None:
    assert unknown_key(f"{OWN}.bad_data.all_masked") == (
        f"{OWN}.bad_data.all_masked is now {OWN}.faults.bad_data.all_masked; rename it"
    )


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("max_lagg", "staleness.max_lag"),
        ("every", "weight_sync.every"),
        ("max_staleness", "staleness.max_lag"),
        ("staleness.wait_timeout", "faults.wait_timeout_s"),
        ("weight_sync.in_flight", "weight_sync.in_flight_policy"),
        ("weight_sync.evry", "weight_sync.every"),
        ("faults.bad_data.empty_answers", "faults.bad_data.empty_answer"),
    ],
)
def test_an_unknown_name_gets_the_nearest_knob(path: str, nearest: str) -> None:
    text = unknown(AsyncPipelineConfig, path)
    assert text == f"{OWN}.{path} is unknown (did you mean {nearest!r}?)"


def test_a_name_that_resembles_no_knob_gets_the_nearest_three() -> None:
    text = unknown(AsyncPipelineConfig, "zzz")
    assert text.endswith("; `async-pipeline explain --knobs` lists all")
    near = text.partition("; nearest knobs: ")[2].partition(";")[0].split(", ")
    assert len(near) == 3 and {*near} <= {*knob_paths()}


def test_all_former_names_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(nested({f"{OWN}.max_lag": 1, f"{OWN}.stale": "drop", f"{OWN}.staleness.depth": 1}))
    text = str(caught.value)
    assert f"{OWN}.max_lag is now {OWN}.staleness.max_lag; rename it; {OWN}.stale is now" in text
    assert "\n" not in text


def test_the_former_value_of_a_knob_is_sent_to_the_current_one() -> None:
    with pytest.raises(
        ConfigError, match="must be one of wait, .*, got 'resume'; write regenerate, its current"
    ):
        resolve(nested({f"{OWN}.staleness.straggler": "resume"}))


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


@pytest.mark.parametrize(
    ("path", "now"),
    [
        (f"{OWN}.max_lag", f"{OWN}.staleness.max_lag"),
        (f"{OWN}.staleness.max_lag", f"{OWN}.staleness.max_lag"),
        ("max_lag", "max_lag"),
        ("trainer.project_name", "trainer.project_name"),
    ],
)
def test_the_current_path_of_a_knob(path: str, now: str) -> None:
    assert current_path(path) == now
