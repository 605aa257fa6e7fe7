# SPDX-License-Identifier: Apache-2.0
"""Processes read the knobs and run state that the launch wrote into verl's config."""

from __future__ import annotations

import pickle
from types import ModuleType

import pytest
from omegaconf import OmegaConf

from recipe.async_pipeline.config.keys.entry_points import FULLY_ASYNC
from recipe.async_pipeline.config.paths import OWN
from recipe.async_pipeline.verl_bridge.launch.run_config import ReadOnce, apply_entry_point
from tests.conftest import Load
from tests.verl_bridge.conftest import Smoke

pytestmark = pytest.mark.real_engine


def test_knobs_and_run_state_are_read_from_a_prepared_config(
    launch: ModuleType, smoke: Smoke, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNC_PIPELINE_STARTED_UNIX", "1234.5")
    config = smoke({f"{OWN}.weight_sync.verify_tensors": 4, f"{OWN}.run_dir": "mine"})
    launch.prepare(config)
    module = load("recipe.async_pipeline.verl_bridge.launch.run_config")
    knobs, runtime = module.knobs_of(config), module.runtime_of(config)
    assert (knobs.weight_sync.verify_tensors, knobs.run_dir) == (4, "mine")
    assert (runtime.run_dir.name, runtime.run_dir.is_absolute()) == ("mine", True)
    assert (runtime.started_unix, runtime.old_logp, runtime.resume_from) == (1234.5, "update", None)
    assert [pool.name for pool in runtime.placement.pools] == ["train", "generate"]


def test_a_value_that_cannot_be_resolved_is_left_to_the_checks() -> None:
    given = OmegaConf.create({"data": {"path": "${nowhere}"}})
    assert apply_entry_point(given, FULLY_ASYNC) == ((), ())


def test_a_view_reads_each_key_once_and_survives_pickling() -> None:
    config = OmegaConf.create({"a": {"b": 1, "c": "${a.b}"}, "text": "x"})
    OmegaConf.set_struct(config, True)
    view = ReadOnce(config)
    assert (view.a.b, view.a.c, view.text) == (1, 1, "x")
    assert view.a is view.a
    assert getattr(view.a, "missing", 7) == 7
    config.a.b = 2
    assert view.a.b == 1
    copied = pickle.loads(pickle.dumps(ReadOnce(config)))
    assert copied.a.b == 2
