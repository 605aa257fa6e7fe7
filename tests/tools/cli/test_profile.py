# SPDX-License-Identifier: Apache-2.0
"""`async-pipeline profile`."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipe.async_pipeline.cli import main
from recipe.async_pipeline.console import EXIT_USERS
from recipe.async_pipeline.tools.plan.profile import load
from tests.tools.plan.runs import write_run
from tests.tools.plan.workloads import profile, setting


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_run(setting(profile(), "one_step_off"), tmp_path / "run")
    return tmp_path / "run"


def test_a_written_profile_can_be_loaded(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "p.yaml"
    assert main.main(["profile", str(run), "--out", str(out), "--fixed-share", "1"]) == 0
    assert f"async-pipeline plan --profile {out}" in capsys.readouterr().out
    found = load(str(out))
    assert found.origin == "measured"
    assert found.stages.update.fixed_s == pytest.approx(0.5)


def test_without_out_the_profile_is_printed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["profile", str(run)]) == 0
    assert "origin: measured" in capsys.readouterr().out


def test_a_user_error_is_one_line(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        ([str(tmp_path / "nothing")], "has no events.jsonl"),
        ([str(run), "--fixed-share", "2"], "--fixed-share must be from 0 to 1, got 2.0"),
        ([str(run), "--out", str(tmp_path / "no" / "p.yaml")], "cannot be written"),
    ):
        assert main.main(["profile", *arguments]) == EXIT_USERS
        assert message in capsys.readouterr().err
