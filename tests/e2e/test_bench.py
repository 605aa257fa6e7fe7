# SPDX-License-Identifier: Apache-2.0
"""Measure one step of a verl trainer, one of an async_pipeline arm, and a few weight updates."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from recipe.async_pipeline.lab.bench.checkpoint import TARGETS, CheckpointSize
from recipe.async_pipeline.lab.bench.checkpoint import run_job as run_checkpoints
from recipe.async_pipeline.lab.bench.weight_sync_jobs import Engines, make_task, run_ways
from tests.e2e.job import ROOT, Job, check_clean_end, check_events
from tests.fakes.private_mounts import may_unshare

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

WORKLOAD = """
reason: the shortest job that uses every probe
steps: 1
warmup: 1
cooldown: 0
episode: {turns: 2, tool_s: {median: 0.2, sigma: 0.5, cap: 1.0}}
judge_s: {median: 0.2, sigma: 0.5, cap: 1.0}
overrides: {data.max_response_length: 9}
"""


def bench(tied_task: Path, tmp_path: Path, *arms: str) -> dict[str, Any]:
    """What it found, of which every arm was measured."""
    workload, out = tmp_path / "short.yaml", tmp_path / "b.json"
    workload.write_text(WORKLOAD)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "recipe.async_pipeline", "bench", "--no-stock-poll", "--repeats", "1"),
            *("--arms", ",".join(arms), "--workload", str(workload), "--json", str(out)),
            *("--logs", str(tmp_path / "logs"), "--engine", "vllm"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    data: dict[str, Any] = json.loads(out.read_text())
    assert data["failed"] == {}
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    for name in arms:
        arm = data["arms"][name]
        assert arm["stall_train_s"] > 0, "the weights were published"
        assert 0 <= arm["trainer_idle"]["median"] < 1
        assert arm["cpu_s"]["train"] > 0
        assert arm["cpu_s"]["generate"] > 0
        assert arm["bound_step_s"] > 0
        assert arm["first_step_s"]["median"] > 0
    return data


def test_two_arms_side_by_side(tied_task: Path, tmp_path: Path) -> None:
    """verl's own trainer and manager publish through our engine, too."""
    data = bench(tied_task, tmp_path, "verl_separate_async", "fully_async")
    assert data["engine"] == "vllm"
    assert data["ratios"]["fully_async/verl_separate_async"]["median"] > 0
    assert 1 <= data["arms"]["fully_async"]["lag_max"] <= 6
    check_our_job(
        tmp_path / "logs" / "1-fully_async" / "run",
        steps=sum(data["workload"][part] for part in ("warmup", "steps", "cooldown")),
    )


def check_our_job(run_dir: Path, steps: int) -> None:
    """The job of our arm is also the whole job with groups in the order of completion that these tests
    look at.
    """
    job = Job(0, "", run_dir)
    summary = check_clean_end(job, "fully_async", 6, steps)
    check_events(job)
    assert summary["overlap_s"] > 0
    assert [m["step"] for m in job.metrics()] == list(range(1, steps + 1))
    assert (run_dir.parent / "latest").resolve() == run_dir.resolve()


def test_publications_are_measured(tmp_path: Path) -> None:
    said: list[str] = []
    task = make_task(2 * 10**6, tmp_path / "task")
    ways = ["dual_buffer", "dual_buffer_host"]
    rows = run_ways(ways, tmp_path / "job", task, Engines(1), versions=3, say=said.append)
    for row in rows.values():
        assert row["gather_s"]["median"] <= row["trainer_stall_s"]["median"] < 5
        assert 0 < row["load_s"]["median"] <= row["publication_s"]["median"]
        assert row["gather_gb_s"] > 0
        assert 1 < row["host_memory_versions"] < 3
    assert rows["dual_buffer_host"]["generator_stall_s"]["max"] > 0, "a load holds the engine"


@pytest.mark.skipif(not may_unshare(), reason="namespaces require root")
def test_publications_on_two_hosts_are_measured(tmp_path: Path) -> None:
    """One replica on each host; versions travel to the second one as differences."""
    task = make_task(2 * 10**6, tmp_path / "task")
    engines = Engines(2, hosts=2, delta=True)
    rows = run_ways(["dual_buffer_host"], tmp_path / "job", task, engines, versions=3, say=lambda line: None)
    row = rows["dual_buffer_host"]
    assert 0 < row["transfer_s"]["median"] <= row["publication_s"]["median"] * 2
    assert 1 < row["host_memory_versions"] < 3, "each host holds two versions at most"


def test_checkpoints_are_measured(tmp_path: Path) -> None:
    """With finished tokens and tokens in flight; every published checkpoint can be read."""
    size = CheckpointSize(groups=4, answers=2, tokens=50)
    found = run_checkpoints(size, size.groups, tmp_path / "job", lambda line: None)
    assert (found["checkpoints"], found["unreadable"]) == (4, [])
    assert (found["contents"]["finished"], found["contents"]["in_flight"]) == (400, 400)
    assert 0 < found["held_s"] <= found["whole_s"]
    assert found["memory_mib"] < TARGETS["memory_mib"], "samples go through the trainer's process"


def test_the_control_plane(tmp_path: Path) -> None:
    """Every prompt that was drawn was trained or filtered, and the sample store is empty."""
    out = tmp_path / "c.json"
    sizes = {"groups": 4, "answers": 2, "replicas": 2, "steps": 3, "lag": 1, "filtered": 0.3}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "recipe.async_pipeline", "bench", "control-plane"),
            *(f"--{name}={value}" for name, value in sizes.items()),
            *("--workers=1", "--answer-s=0.05", "--json", str(out), "--logs", str(tmp_path / "logs")),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    data = json.loads(out.read_text())
    assert set(data["cpu_ms_per_trajectory"]) >= {"driver", "workers", "store", "rewards", "servers", "total"}
    assert data["cpu_ms_per_trajectory"]["driver"] > 0
    assert data["control_latency_s"]["p99"] >= data["control_latency_s"]["p50"] > 0
    assert data["loop_lag_s"]["p99"] >= 0
    assert data["samples_per_s"] > 0
    assert "memory_mib_per_100_steps" in data

    groups = data["groups"]
    assert groups["trained"] == 12
    assert groups["drawn"] == groups["trained"] + groups["filtered"]
    assert groups["in_flight"] == data["left_in_store"] == 0
    assert data["trajectories"]["trained"] == 24
    assert sum(data["most_open_requests"]) > 0
