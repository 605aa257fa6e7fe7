# SPDX-License-Identifier: Apache-2.0
"""`async-pipeline verify-gpu`: options, exit status and reports."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from recipe.async_pipeline.cli.main import main
from recipe.async_pipeline.lab.cli import verify_gpu
from recipe.async_pipeline.lab.gpu_kit import steps
from recipe.async_pipeline.lab.gpu_kit.catalogue import STEPS
from recipe.async_pipeline.lab.gpu_kit.steps import FAILED, PASSED, Result, Status


def nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "find_spec", lambda name: None)


@pytest.mark.parametrize(
    ("installed", "words"),
    [
        (True, "no CUDA device was found by torch; "),
        (False, "no CUDA device was found: torch is not installed"),
    ],
)
def test_without_a_gpu_it_is_one_line(
    installed: bool,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(steps, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(verify_gpu, "count_devices", lambda device: 0)
    assert main(["verify-gpu", "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert words in said and "use --device cpu" in said and len(said.splitlines()) == 1
    assert not (tmp_path / "gpu_report.json").exists()


def test_the_help_says_what_each_step_needs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["verify-gpu", "--help"])
    listed = " ".join(capsys.readouterr().out.partition("steps, each with")[2].split())
    assert all(f"needs {', '.join(step.needs)}" in listed for step in STEPS)


def test_a_report_has_all_steps_and_none_that_ran_is_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing_is_installed(monkeypatch)
    command = ["verify-gpu", "--device", "cpu", "--only", "copies,delivery", "--out", str(tmp_path)]
    assert main(command) == 1
    assert f"0 passed, 0 failed, {len(STEPS)} not run" in capsys.readouterr().out
    found = json.loads((tmp_path / "gpu_report.json").read_text(encoding="utf-8"))
    assert [step["name"] for step in found["steps"]] == [step.name for step in STEPS]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", found["machine"]["date"])
    details = {step["name"]: step["detail"] for step in found["steps"]}
    assert details["copies"].startswith("needs torch") and details["job"] == "not selected"
    assert not (tmp_path / "gpu_report.html").exists(), "a page needs jinja2"


@pytest.mark.parametrize(("status", "code"), [(PASSED, 0), (FAILED, 1)])
def test_a_failed_step_is_the_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: Status, code: int
) -> None:
    result = Result(name="copies", shows="speed of copies", status=status)
    monkeypatch.setattr(verify_gpu, "run_steps", lambda *steps, **how: [result])
    assert main(["verify-gpu", "--device", "cpu", "--out", str(tmp_path)]) == code
    assert "speed of copies" in (tmp_path / "gpu_report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--device", "cpu", "--only", "copies,engines"],
            "--only must name steps of environment, copies, .* got 'engines'",
        ),
        (["--device", "cpu", "--gpus", "3"], "--gpus must be 1 to 2, as --device is cpu, got 3"),
        (["--device", "cpu", "--out", "/dev/null/out"], "--out /dev/null/out cannot be created .Not a dir"),
    ],
)
def test_wrong_options_are_one_line(
    tmp_path: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify-gpu", "--out", str(tmp_path), *arguments]) == 2
    said = capsys.readouterr().err.strip()
    assert "\n" not in said
    assert re.search(words, said)
