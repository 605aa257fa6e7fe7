# SPDX-License-Identifier: Apache-2.0
"""The command of the control-plane benchmark: its overrides, its figures and its output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipe.async_pipeline.cli.main import main
from recipe.async_pipeline.lab.bench import control_plane
from recipe.async_pipeline.lab.bench.control_plane import (
    CHECK,
    END,
    LOOP,
    SERVED,
    TRAINED,
    JobSize,
    figures,
    growth,
    largest_batch,
    overrides_of,
)
from recipe.async_pipeline.lab.bench.measuring.spans import MeasuredSpan
from recipe.async_pipeline.lab.bench.measuring.usage import Usage
from recipe.async_pipeline.lab.bench.runner import JobFailed

LAG = {"p50": 0.001, "p99": 0.004, "max": 0.02, "own_p50": 0.0, "own_p99": 0.002, "own_max": 0.01}
LOAD = JobSize(groups=4, answers=2, replicas=3, steps=2, lag=1, filtered=0.5, answer_s=0.1, workers=1)


def measured(groups: int = 4) -> dict[str, Any]:
    """The figures of a job of two steps that spent 0.1 CPU-seconds in each part between 10 and 20 s."""
    parts = ("driver", "workers", "store", "rewards", "servers", "other", "ray")
    usage = [Usage(10.0, dict.fromkeys(parts, 1.0), 0), Usage(20.0, dict.fromkeys(parts, 1.1), 0)]
    spans = [
        MeasuredSpan(SERVED, 8.0, 10.0, {"version": 0}),
        MeasuredSpan(CHECK, 9.0, 11.0, {}),
        MeasuredSpan(CHECK, 11.0, 11.5, {}),
        MeasuredSpan(TRAINED, 14.0, 15.0, {"step": 1, "trajectories": 8, "private_bytes": 5 << 20}),
        MeasuredSpan(TRAINED, 19.0, 20.0, {"step": 2, "trajectories": 8}),
        MeasuredSpan(LOOP, 20.0, 20.0, LAG),
        MeasuredSpan(END, 21.0, 21.0, {"most_open_requests": [3, 2, 3], "left_in_store": 0}),
    ]
    summary = {
        "groups_drawn": 10,
        "groups_trained": 8,
        "groups_filtered": 2,
        "groups_in_flight": 0,
        "samples_trained": 16,
    }
    return figures(LOAD, spans, usage, summary)


def test_costs_are_per_finished_trajectory() -> None:
    found = measured()
    # 0.1 s over (8 + 2) groups of 2 responses.
    assert set(found["cpu_ms_per_trajectory"]) == {
        *("driver", "workers", "store", "rewards", "servers", "other", "ray", "total")
    }
    assert found["cpu_ms_per_trajectory"]["driver"] == pytest.approx(5.0)
    # The engines and Ray's daemons are left out.
    assert found["cpu_ms_per_trajectory"]["total"] == pytest.approx(25.0)
    assert found["samples_per_s"] == pytest.approx(2.0)


def test_only_calls_of_the_measured_time_count() -> None:
    found = measured()
    assert found["control_latency_s"] == {"p50": 0.5, "p99": 0.5}
    assert found["control_calls"] == 1


def test_growth_is_the_slope_after_the_warm_up() -> None:
    warm = [(step, 2**20 * 50 * step) for step in range(0, 50, 5)]
    flat = [(step, 2**20 * (500 + step // 10)) for step in range(50, 101, 5)]
    assert growth([*warm, *flat]) == pytest.approx(10.0, abs=1.0)
    assert growth(flat[:1]) is None
    assert growth([]) is None


def test_the_overrides_describe_the_load(tmp_path: Path) -> None:
    lines = overrides_of(LOAD, tmp_path)
    for line in (
        "++async_strategy='n_step_ahead'",
        "++trainer.v1.async_pipeline.staleness.max_lag=1",
        "++data.train_batch_size=4",
        "++actor_rollout_ref.rollout.n=2",
        "++actor_rollout_ref.rollout.n_gpus_per_node=3",
        "++algorithm.filter_groups.enable=true",
    ):
        assert line in lines
    on_policy = JobSize(
        groups=4, answers=2, replicas=3, steps=2, lag=0, filtered=0.0, answer_s=0.1, workers=1
    )
    lines = overrides_of(on_policy, tmp_path)
    assert "++async_strategy='on_policy'" in lines
    assert "++algorithm.filter_groups.enable=false" in lines


def with_lag(batch: int, p99: float) -> dict[str, Any]:
    return {**measured(), "batch": batch, "loop_lag_s": {**LAG, "p99": p99}}


def test_the_largest_batch_is_the_last_below_the_limit() -> None:
    assert largest_batch([with_lag(64, 0.002), with_lag(128, 0.009), with_lag(256, 0.02)]) == 128
    assert largest_batch([with_lag(64, 0.02)]) == 0


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[JobSize]:
    """The jobs that were run; the lag of one with 64 prompts or more is 20 ms."""
    ran: list[JobSize] = []

    def run_job(load: JobSize, *rest: Any) -> dict[str, Any]:
        ran.append(load)
        return with_lag(load.groups * load.answers, 0.02 if load.groups >= 64 else 0.001)

    monkeypatch.setattr(control_plane, "run_job", run_job)
    return ran


def test_figures_are_written_and_shown(
    jobs: list[JobSize], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "c.json"
    assert main(["bench", "control-plane", "--groups", "8", "--json", str(out)]) == 0
    data = json.loads(out.read_text())
    assert data["load"]["groups"] == 8
    assert jobs == [JobSize(**data["load"])]
    assert data["load"]["steps"] == 20
    assert {"p50", "p99"} <= set(data["loop_lag_s"])
    assert "| CPU ms per trajectory |" in capsys.readouterr().out


@pytest.mark.usefixtures("jobs")
def test_json_goes_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "control-plane", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["batch"] == 16384


def test_search_stops_at_the_first_size_above_the_limit(
    jobs: list[JobSize], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "control-plane", "--search", "--groups", "1024"]) == 0
    assert [load.groups for load in jobs] == [16, 32, 64, 1024]
    assert "largest batch with less than 10.0 ms of lag: 512" in capsys.readouterr().out


def test_the_given_size_runs_once_and_counts(jobs: list[JobSize], capsys: pytest.CaptureFixture[str]) -> None:
    for groups in (8, 32):
        assert main(["bench", "control-plane", "--search", "--groups", str(groups)]) == 0
        assert f"less than 10.0 ms of lag: {16 * groups}" in capsys.readouterr().out
    assert [load.groups for load in jobs] == [8, 16, 32]


def test_a_failed_job_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_job(*rest: Any) -> dict[str, Any]:
        raise JobFailed("status 1: boom")

    monkeypatch.setattr(control_plane, "run_job", run_job)
    assert main(["bench", "control-plane"]) == 1
    assert "failed: status 1: boom" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--groups", "0"], "--groups must be >= 1, got 0"),
        (["--steps", "0"], "--steps must be >= 1, got 0"),
        (["--lag", "-1"], "--lag must be >= 0, got -1"),
        (["--filtered", "1"], "--filtered must be in [0, 1), got 1"),
        (["--answers", "1"], "--filtered needs --answers >= 2, got 1"),
        (["--answer-s", "0"], "--answer-s must be > 0, got 0"),
    ],
)
def test_sizes_are_checked(
    option: list[str], message: str, jobs: list[JobSize], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "control-plane", *option]) == 2
    assert message in capsys.readouterr().err
    assert not jobs
