# SPDX-License-Identifier: Apache-2.0
"""Replicas join and leave a run: on a node that joins the Ray cluster, and on request."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from recipe.async_pipeline.lab.event_audit import audit_events
from recipe.async_pipeline.tools.ledger.file import audit_file
from tests.e2e.conftest import StartNodes
from tests.e2e.job import ROOT, Event, interrupt, processes_of, run_job, smoke_command

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]


def test_a_replica_joins_on_a_new_node_and_others_leave_and_come(
    tied_task: Path, tmp_path: Path, nodes: StartNodes
) -> None:
    """After a node with a free device has joined, its replica serves; then the first replica leaves and frees
    its device, on which a third one starts.
    """
    run_dir = tmp_path / "run"
    cluster = nodes(tied_task, 2)
    answers: list[dict[str, Any]] = []

    def replicas(*options: str) -> None:
        command = [
            sys.executable,
            "-m",
            "recipe.async_pipeline",
            "replicas",
            str(run_dir),
            "--json",
            *options,
        ]
        done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
        answers.append(json.loads(done.stdout))

    job = run_job(
        smoke_command(
            "trainer.total_training_steps=1000",
            f"trainer.v1.async_pipeline.run_dir={run_dir}",
            "async_strategy=fully_async",
            "trainer.v1.async_pipeline.fleet.max_replicas=2",
            *cluster.overrides,
        ),
        run_dir,
        tied_task,
        events=[
            Event(" 2/1000", lambda process: cluster.add(1)),
            Event("replica 1 has joined and serves version "),
            Event("/1000 "),
            Event("/1000 ", lambda process: replicas("--remove", "replica 0")),
            Event("replica 0 has left"),
            Event("/1000 "),
            Event("/1000 ", lambda process: replicas("--add", "1")),
            Event("replica 2 has joined and serves version "),
            Event("/1000 "),
            Event("/1000 ", lambda process: replicas()),
            Event("/1000 ", interrupt),
        ],
    )
    assert job.ended_after_event_s is not None, job.output[-3000:]
    assert processes_of(run_dir) == []
    assert audit_file(run_dir).violations == []
    events = list(job.events())
    assert audit_events(events).violations == []

    changes = [(e["event"], e["replica"]) for e in events if "replica" in e and e["role"] == "param_update"]
    assert changes == [
        ("JOINING", "replica 1"),
        ("JOINED", "replica 1"),
        ("LEAVING", "replica 0"),
        ("LEFT", "replica 0"),
        ("JOINING", "replica 2"),
        ("JOINED", "replica 2"),
    ]
    joined = next(e for e in events if e["event"] == "JOINED")
    served = [e["version"] for e in events if e["event"] == "SERVED" and e["t"] <= joined["t"]]
    assert joined["version"] >= served[-1], "at the newest version"

    counts = [e["replicas"] for e in events if e["event"] == "SERVED"]
    assert [count for count, _ in groupby(counts)] == [1, 2, 1, 2]
    assert not [e for e in events if e["event"] == "STEPPED"], "none of it is a failure"
    sizes = [e["devices"] for e in events if e["event"] == "RESIZED"]
    assert sizes == [2, 1, 2]
    assert job.summary["device_seconds"]["generate"]["devices"] == 2

    assert answers[0]["removed"] == "replica 0" and answers[1]["added"] == ["replica 2"]
    rows = {row["name"]: row for row in answers[2]["replicas"]}
    assert {name: row["state"] for name, row in rows.items()} == {
        "replica 1": "serving",
        "replica 2": "serving",
    }
    assert rows["replica 1"]["node"] == "127.0.0.2" and rows["replica 1"]["version"] > joined["version"]
