# SPDX-License-Identifier: Apache-2.0
"""What is read from a run's directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipe.async_pipeline.errors import ConfigError
from recipe.async_pipeline.tools.plan.profile import Stage, Stages
from recipe.async_pipeline.tools.plan.run_log import read_run
from recipe.async_pipeline.tools.plan.simulated.simulation import simulate
from tests.tools.plan.runs import write_run
from tests.tools.plan.workloads import profile, setting

COSTS = {
    "draw": 0.01,
    "assemble": 0.02,
    "logp": 0.3,
    "ref_logp": 0.2,
    "values": 0.25,
    "advantage": 0.04,
    "update": 0.5,
    "critic": 0.35,
    "gather": 0.15,
    "finish": 0.06,
}


def test_each_stage_took_its_cost(tmp_path: Path) -> None:
    of = profile(stages=Stages(**{name: Stage(fixed_s=seconds) for name, seconds in COSTS.items()}))
    write_run(setting(of, "one_step_off", steps=8), tmp_path)
    run = read_run(tmp_path)
    for name, seconds in COSTS.items():
        by_step = run.stage(name)
        assert list(by_step.values()) == pytest.approx([seconds] * len(by_step), abs=2e-6), name
        assert len(by_step) >= 8, name


def test_steps_settings_and_tokens_are_read(tmp_path: Path) -> None:
    there = setting(profile(), "n_step_ahead", max_lag=2, steps=16)
    write_run(there, tmp_path)
    run = read_run(tmp_path)
    assert run.step_ends_s == pytest.approx(simulate(there).step_ends_s, abs=2e-6)
    assert (run.knobs, run.placement) == (there.knobs, there.placement)
    assert set(run.tokens.values()) == {4 * 2 * 10}
    assert run.lag_mean > 1


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no events.jsonl; give the directory of a run"):
        read_run(tmp_path)
    (tmp_path / "summary.json").write_text('{"status": "failed", "error": "ValueError: mine"}')
    with pytest.raises(
        ConfigError, match=r"no events.jsonl; it ended \(failed\) before it began: ValueError"
    ):
        read_run(tmp_path)
    (tmp_path / "events.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"has no settings.json"):
        read_run(tmp_path)
    (tmp_path / "settings.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"has no finished group or no step"):
        read_run(tmp_path)
