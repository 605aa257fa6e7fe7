# SPDX-License-Identifier: Apache-2.0
"""Processes read the knobs and run state that the launch wrote into verl's config."""

from __future__ import annotations

from types import ModuleType

import pytest

from recipe.async_pipeline.config.paths import OWN
from tests.conftest import Load
from tests.verl_bridge.conftest import Smoke

pytestmark = pytest.mark.real_engine


def test_knobs_and_run_state_are_read_from_a_prepared_config(
    launch: ModuleType, smoke: Smoke, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNC_PIPELINE_STARTED_UNIX", "1234.5")
    config = smoke({f"{OWN}.weight_sync.verify_tensors": 4, f"{OWN}.run_dir": "mine"})
    launch.prepare(config)
    module = load("recipe.async_pipeline.verl_bridge.run_config")
    knobs, runtime = module.knobs_of(config), module.runtime_of(config)
    assert (knobs.weight_sync.verify_tensors, knobs.run_dir) == (4, "mine")
    assert (runtime.run_dir.name, runtime.run_dir.is_absolute()) == ("mine", True)
    assert (runtime.started_unix, runtime.old_logp, runtime.resume_from) == (1234.5, "trainer", None)
    assert [pool.name for pool in runtime.placement.pools] == ["train", "generate"]
