# SPDX-License-Identifier: Apache-2.0
"""`async-pipeline verify-gpu`: options, exit status and reports."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from recipe.async_pipeline.cli import verify_gpu
from recipe.async_pipeline.cli.main import main
from recipe.async_pipeline.gpu_kit.steps import FAILED, NOT_RUN, PASSED, Result, Status


def test_without_the_devices_it_says_what_was_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_gpu, "count_devices", lambda device: 0)
    assert main(["verify-gpu", "--only", "copies,delivery", "--out", str(tmp_path)]) == 0
    assert "0 passed, 0 failed, 2 not run" in capsys.readouterr().out
    found = json.loads((tmp_path / "gpu_report.json").read_text(encoding="utf-8"))
    assert [step["status"] for step in found["steps"]] == [NOT_RUN, NOT_RUN]
    assert "2 not run" in (tmp_path / "gpu_report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(("status", "code"), [(PASSED, 0), (FAILED, 1)])
def test_a_failed_step_is_the_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: Status, code: int
) -> None:
    result = Result(name="copies", shows="", status=status)
    monkeypatch.setattr(verify_gpu, "run_steps", lambda *steps, **how: [result])
    assert main(["verify-gpu", "--device", "cpu", "--out", str(tmp_path)]) == code


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "copies,engines"], "--only must name steps of environment, copies, .* got 'engines'"),
        (["--device", "cpu", "--gpus", "3"], "--gpus must be 1 to 2, .* got 3"),
    ],
)
def test_wrong_options_are_one_line(
    tmp_path: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify-gpu", *arguments, "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err.strip()
    assert "\n" not in said
    assert re.search(words, said)
