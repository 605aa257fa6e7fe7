# SPDX-License-Identifier: Apache-2.0
"""Compare predicted and measured figures of a run that was simulated itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipe.async_pipeline.cli import main
from recipe.async_pipeline.console import EXIT_USERS
from recipe.async_pipeline.tools.plan.distribution import Lognormal
from recipe.async_pipeline.tools.plan.profile import Answers, Batch, Decode, Stage, Stages, Sync, dump
from tests.tools.plan.runs import write_run
from tests.tools.plan.workloads import profile, setting

KNOWN = profile(
    batch=Batch(groups=8, answers=4),
    answers=Answers(tokens=Lognormal(median=60, sigma=0.8, cap=400), prompt_tokens=10.0, reward_s=0.2),
    decode=Decode(token_s=(0.02,), slots=512),
    stages=Stages(update=Stage(fixed_s=2.0), logp=Stage(fixed_s=0.3)),
    sync=Sync(transfer_s=0.05, load_s=0.1),
)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "lag"), [("on_policy", 0), ("one_step_off", 1), ("n_step_ahead", 3)])
def test_a_run_is_predicted_from_its_own_profile(
    strategy: str, lag: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(setting(KNOWN, strategy, max_lag=lag, generate=3, steps=30), tmp_path)
    assert main.main(["simulate", "--against", str(tmp_path), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert abs(facts["error"]) < 0.1
    assert facts["predicted_lag"] == pytest.approx(facts["measured_lag"], abs=0.3)


def test_the_profile_of_another_run_can_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(setting(KNOWN, "one_step_off", generate=3, steps=30), tmp_path)
    (tmp_path / "other.yaml").write_text(dump(profile(stages=Stages(update=Stage(fixed_s=50.0)))))
    assert main.main(["simulate", "--against", str(tmp_path), "--profile", str(tmp_path / "other.yaml")]) == 0
    output = capsys.readouterr().out
    assert "\none_step_off, max_lag 1: predicted 50." in output


def test_a_short_run_is_compared_over_its_second_half(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(setting(KNOWN, "n_step_ahead", max_lag=3, generate=3, steps=18), tmp_path)
    events = tmp_path / "events.jsonl"
    lines = events.read_text().splitlines()
    tenth = next(i for i, line in enumerate(lines) if '"TRAINED"' in line and json.loads(line)["step"] == 10)
    events.write_text("\n".join(lines[: tenth + 1]) + "\n")
    assert main.main(["simulate", "--against", str(tmp_path), "--json"]) == 0
    assert abs(json.loads(capsys.readouterr().out)["error"]) < 0.2
    fourth = next(i for i, line in enumerate(lines) if '"TRAINED"' in line and json.loads(line)["step"] == 4)
    events.write_text("\n".join(lines[: fourth + 1]) + "\n")
    assert main.main(["simulate", "--against", str(tmp_path)]) == EXIT_USERS
    assert "has 4 steps, too few after the warm-up; give a run of at least 8" in capsys.readouterr().err


def test_options_that_the_run_sets_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["simulate", "--against", str(tmp_path), "--devices", "4"]) == EXIT_USERS
    assert "--devices is read from the run with --against, got 4; leave it out" in capsys.readouterr().err
