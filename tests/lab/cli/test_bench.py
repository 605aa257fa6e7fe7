# SPDX-License-Identifier: Apache-2.0
"""`async-pipeline bench`, with jobs that end immediately."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipe.async_pipeline.cli import main
from recipe.async_pipeline.lab.bench.inputs.arms import ARMS, arms_of_engine
from recipe.async_pipeline.lab.bench.measuring.measure import Measured
from recipe.async_pipeline.lab.bench.runner import Job, JobFailed
from recipe.async_pipeline.lab.cli import bench as command
from tests.fakes.bench_results import ONE


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """The jobs that were run; every job of `on_policy` fails."""
    jobs: list[Job] = []

    def run_job(job: Job, *args: Any) -> Measured:
        jobs.append(job)
        if job.arm == "on_policy":
            raise JobFailed("status 1: boom")
        return ONE

    monkeypatch.setattr(command, "run_job", run_job)
    monkeypatch.setattr(command, "ensure_toy", lambda *args, **kwargs: SimpleNamespace(dir=tmp_path))
    monkeypatch.setattr(command, "draw", lambda data, path: path.write_bytes(b"PNG"))
    return jobs


def bench(*arguments: object) -> int:
    return main.main(["bench", *map(str, arguments)])


def test_table_json_and_picture_are_written(
    ran: list[Job], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "b.json"
    status = bench(
        "--arms",
        "verl_sync,one_step_off",
        "--repeats",
        2,
        "--steps",
        3,
        "--json",
        out,
        "--logs",
        tmp_path / "logs",
    )
    assert status == 0
    assert [(job.arm, job.turn) for job in ran] == [
        ("verl_sync", 1), ("one_step_off", 1), ("verl_sync", 2), ("one_step_off", 2), ("verl_sync", 0),
    ]  # fmt: skip
    data = json.loads(out.read_text())
    assert data["ratios"]["one_step_off/verl_sync"]["median"] == 1.0
    assert data["workload"]["steps"] == 3
    assert data["complete"]
    assert data["workload"]["warmup"] == 4
    assert (tmp_path / "b.png").exists()
    assert "| `one_step_off` |" in capsys.readouterr().out


def test_every_arm_gets_the_deepest_pipelines_warmup_and_cooldown(ran: list[Job], tmp_path: Path) -> None:
    out = tmp_path / "b.json"
    assert bench("--arms", "one_step_off,n_step_ahead_lag6", "--repeats", 1, "--json", out) == 0
    workload = json.loads(out.read_text())["workload"]
    assert (workload["warmup"], workload["cooldown"]) == (7, 7)


def test_a_failing_arm_does_not_stop_the_other_arms(ran: list[Job], tmp_path: Path) -> None:
    out = tmp_path / "b.json"
    assert bench("--arms", "on_policy,one_step_off", "--repeats", 2, "--json", out) == 1
    assert [job.arm for job in ran] == ["on_policy", "on_policy", "one_step_off", "one_step_off"], (
        "a failed job is retried once"
    )
    assert ran[0].directory != ran[1].directory
    data = json.loads(out.read_text())
    assert data["failed"] == {"on_policy": "status 1: boom"}
    assert list(data["arms"]) == ["one_step_off"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--arms", "nope"), "--arms must name each arm once"),
        (("--workload", "nope"), "no workload 'nope'"),
        (("--repeats", 0), "--repeats must be >= 1, got 0"),
        (("--steps", 0), "--steps must be >= 1, got 0"),
        (("--json", "/nowhere/b.json"), "the directory /nowhere does not exist"),
        (("--logs", Path(__file__).parent), "is not empty"),
    ],
)
def test_a_user_error_is_one_line_and_status_2(
    ran: list[Job], capsys: pytest.CaptureFixture[str], arguments: tuple[object, ...], message: str
) -> None:
    assert bench(*arguments) == 2
    assert message in capsys.readouterr().err
    assert ran == []


def test_the_help_breaks_no_name_of_an_arm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main.main(["bench", "--help"])
    text = capsys.readouterr().out
    words = text.replace(",", " ").replace(")", " ").split()
    assert {*ARMS} <= {*words}
    assert not [word for word in words if word.startswith("verl_") and word not in ARMS]


def test_an_engine_is_for_all_arms_that_it_runs(ran: list[Job], tmp_path: Path) -> None:
    out = tmp_path / "b.json"
    assert bench("--engine", "sglang", "--repeats", 1, "--no-stock-poll", "--json", out) == 1
    assert {job.engine for job in ran} == {"sglang"}
    # Jobs of `on_policy` fail here.
    assert list(dict.fromkeys(job.arm for job in ran)) == arms_of_engine(None, "sglang")
    assert json.loads(out.read_text())["engine"] == "sglang"


def test_an_engine_before_another_measurement_is_not_ignored(
    ran: list[Job], capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("--engine", "sglang", "weight-sync") == 2
    assert "put it after weight-sync" in capsys.readouterr().err
    assert bench("--engine", "sglang", "arena") == 2
    assert "not of arena; leave it out" in capsys.readouterr().err


def test_verls_trainers_draw_no_images(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["bench", "--workload", "image", "--arms", "verl_sync,on_policy"]) == 2
    error = capsys.readouterr().err
    assert "must be of this package for a workload of images" in error and "got verl_sync;" in error
