# SPDX-License-Identifier: Apache-2.0
"""Annotations decide which values a knob accepts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Literal

import pytest

from recipe.async_pipeline.config.keys.misplaced import unknown_key
from recipe.async_pipeline.config.knobs.fields import (
    Bounds,
    build,
    check_fields,
    flattened,
    knobs_of,
    sections_of,
    unknown,
)
from recipe.async_pipeline.config.knobs.schema import AsyncPipelineConfig, knob_paths
from recipe.async_pipeline.config.paths import OWN
from recipe.async_pipeline.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Inner:
    word: Literal["a", "b"] = "a"
    share: Annotated[float, Bounds(above=0, most=1, remedy="1 is all")] | None = None
    either: Literal[False, True, "some"] = False


@dataclass(frozen=True, kw_only=True)
class Outer:
    MAY_CHANGE: ClassVar[tuple[str, ...]] = ("switch", "inner")

    count: Annotated[int, Bounds(least=1)] = 3
    switch: bool = False
    name: str | None = None
    items: tuple[str, ...] = ()
    table: Mapping[str, Any] | None = None
    inner: Inner = Inner()


def test_a_knob_stays_as_it_is_unless_it_or_its_section_declares_otherwise() -> None:
    changeable = [knob.path for knob in knobs_of(Outer) if knob.may_change]
    assert changeable == ["switch", "inner.word", "inner.share", "inner.either"]


CHANGEABLE = {
    "": "run_dir pools validation engine_check",
    "training": "old_logp",
    "rollout": "max_open_requests",
    "weight_sync": "timeout_s load_staging max_concurrent_loads verify_tensors gather_bucket_size_mb delta "
    "load_bucket_size_mb",
    "fleet": "max_replicas",
    "reward": "timeout_s attempts concurrency batch memory_mb failure default",
    "agentic": "agent_env sandbox sandbox_hidden isolation concurrency env_timeout_s tool_timeout_s attempts "
    "episode_timeout_s",
    "agentic.gateway": "host lease_s runners_dir unix_dir",
    "agentic.ends": "turns chains tokens cut_off invalid env_failed agent_failed deadline",
    "diffusion": "validation_steps",
    "faults": "wait_timeout_s checkpoint_stall_s verify_checkpoint_at_start notice_s strict_observers "
    "max_prompt_attempts",
    "faults.bad_data": "nonfinite_logprobs empty_answer all_masked long_prompt unusable_prompt "
    "missing_answers failed_episode teacher_logprobs",
}
"""The knobs that may change at a resume, by section. Add one only if neither what is trained nor what a
checkpoint holds depends on it, or if a run may have ended for its value.
"""


def test_a_new_knob_may_not_change_at_a_resume_without_a_decision() -> None:
    """A section that may change as a whole gives that to each knob that is added to it."""
    decided = {
        f"{section}.{name}".lstrip(".") for section in CHANGEABLE for name in CHANGEABLE[section].split()
    }
    assert {knob.path for knob in knobs_of(AsyncPipelineConfig) if knob.may_change} == decided


def test_every_declaration_names_a_knob_or_section() -> None:
    for cls in (AsyncPipelineConfig, *sections_of(AsyncPipelineConfig).values()):
        assert set(getattr(cls, "MAY_CHANGE", ())) <= {field.name for field in fields(cls)}, cls.__name__


def test_knobs_are_listed_with_their_sections() -> None:
    paths = [knob.path for knob in knobs_of(Outer)]
    assert paths == ["count", "switch", "name", "items", "table", "inner.word", "inner.share", "inner.either"]
    assert sections_of(Outer) == {"inner": Inner}
    assert knobs_of(Outer)[5].choices == ("a", "b")
    assert str(knobs_of(Outer)[6].bounds) == "> 0 and at most 1"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": 0}, "x.count must be >= 1, got 0; leave it out for the default"),
        ({"count": True}, "x.count must be a whole number, got True; leave it out for the default"),
        ({"count": 1.0}, "x.count must be a whole number, got 1.0; leave it out for the default"),
        ({"switch": 1}, "x.switch must be True or False, got 1; leave it out for the default"),
        ({"name": 3}, "x.name must be text, got 3; leave it out for the default"),
        ({"items": "ab"}, "x.items must be a list of texts, got 'ab'; leave it out for the default"),
        ({"items": [1]}, "x.items must be a list of texts, got [1]; leave it out for the default"),
        ({"inner.word": "c"}, "x.inner.word must be one of a, b, got 'c'; a is the default"),
        ({"inner.share": 0}, "x.inner.share must be > 0 and at most 1, got 0; 1 is all"),
        ({"inner.share": float("nan")}, "x.inner.share must be > 0 and at most 1, got nan; 1 is all"),
        ({"inner.share": "1"}, "x.inner.share must be a number, got '1'; 1 is all"),
        ({"inner.either": 1}, "x.inner.either must be one of False, True, some, got 1; False is the default"),
        (
            {"inner.either": "True"},
            "x.inner.either must be one of False, True, some, got 'True'; False is the default",
        ),
    ],
)
def test_a_wrong_value_names_path_rule_value_and_remedy(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_fields(build(Outer, values), "x")
    assert str(caught.value) == message


def test_values_reach_their_sections_and_none_means_the_default() -> None:
    values = {"count": None, "items": ["a"], "table": {"k": 1}, "inner.share": 0.5, "inner.either": True}
    made = build(Outer, values)
    assert made == Outer(items=("a",), table={"k": 1}, inner=Inner(share=0.5, either=True))
    check_fields(made, "x")


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
