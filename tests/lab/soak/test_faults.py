# SPDX-License-Identifier: Apache-2.0
"""Detecting recovery, and flipping a bit that is restored afterwards."""

from __future__ import annotations

import json
import signal
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from recipe.async_pipeline.lab.job import FoundProcess
from recipe.async_pipeline.lab.soak import faults
from recipe.async_pipeline.lab.soak.job import SoakFailed, SoakJob
from recipe.async_pipeline.weight_sync.memory.segment_names import SHM_DIR, new_name
from tests.fakes.soak_run import Run, record


def test_recovery_needs_the_fenced_replica_to_rejoin(job: Run) -> None:
    job.write(record("FENCED", replica="replica 0"), record("REJOINED", replica="replica 0"))

    def inflict(_: SoakJob) -> None:
        job.write(record("REJOINED", replica="replica 1"), record("FENCED", replica="replica 0"))

    fault = faults.Fault("", inflict, "a replica is back")
    with pytest.raises(TimeoutError, match="0 s without a rejoined replica"):
        faults.strike(job, fault, 0.0)

    def and_back(_: SoakJob) -> None:
        inflict(_)
        job.write(record("REJOINED", replica="replica 0"))

    assert faults.strike(job, fault._replace(inflict=and_back), 0.0) >= 0


def test_a_run_that_ends_by_itself_is_noticed(job: Run) -> None:
    def inflict(_: SoakJob) -> None:
        job.dead = True

    with pytest.raises(SoakFailed, match="it ended"):
        faults.strike(job, faults.Fault("", inflict, "versions are served again"), 10.0)


@pytest.fixture
def flooded(job: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    raylet = FoundProcess(7, "ray/raylet --node=x --gcs-address=127.0.0.1:6379 --more")
    monkeypatch.setattr(job, "processes", lambda part="": [raylet] if part == faults.RAYLET else [])
    return job


def flooding(
    monkeypatch: pytest.MonkeyPatch, stdout: str, *, status: int = 0, stderr: str = "", then: Any = None
) -> list[list[str]]:
    """Replace the process of a flood; `then` is called while it runs. Returns the commands."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> Any:
        commands.append(command)
        if then is not None:
            then()
        return subprocess.CompletedProcess(command, status, stdout, stderr)

    monkeypatch.setattr(subprocess, "run", run)
    return commands


WELL = {"requests": 4096, "lost": 0, "check_p99_s": 0.2}


def test_a_flood_goes_to_the_cluster_of_the_run(flooded: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = flooding(monkeypatch, f"noise\n{json.dumps(WELL)}\n")
    flooded.write(record("FENCED", replica="replica 0"))
    faults.flood(flooded)
    (command,) = commands
    assert command[command.index("-m") :][:4] == ["-m", faults.FLOODING, "127.0.0.1:6379", "4096"]
    assert find_spec(faults.FLOODING) is not None
    assert json.dumps(WELL) in flooded.log.read_text()


@pytest.mark.parametrize(
    ("found", "why"),
    [
        ({"lost": 1}, "got 1 of 4096"),
        ({"check_p99_s": 10.5}, "got 0 of 4096 and 10.5 s"),
    ],
)
def test_a_flood_that_does_harm_fails(
    flooded: Run, monkeypatch: pytest.MonkeyPatch, found: dict[str, Any], why: str
) -> None:
    flooding(monkeypatch, json.dumps({**WELL, **found}))
    with pytest.raises(SoakFailed, match=why):
        faults.flood(flooded)


def test_a_replica_that_is_fenced_in_a_flood_fails(flooded: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    flooding(
        monkeypatch,
        json.dumps(WELL),
        then=lambda: flooded.write(record("FENCED", replica="replica 1")),
    )
    with pytest.raises(SoakFailed, match="replica 1 was fenced during a flood"):
        faults.flood(flooded)


def test_a_flood_that_cannot_run_fails(job: Run, flooded: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    flooding(monkeypatch, "", status=1, stderr="FloodFailed: no rollout server has a name\n")
    with pytest.raises(SoakFailed, match="no rollout server has a name"):
        faults.flood(flooded)
    monkeypatch.setattr(job, "processes", lambda part="": [])
    with pytest.raises(SoakFailed, match="no raylet of the run"):
        faults.flood(job)


@pytest.mark.parametrize("meanwhile", ["nothing", "overwritten", "removed"])
def test_a_flipped_bit_is_restored_unless_overwritten(
    job: Run, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    """The servers are stopped until the bit is flipped, so they load it; then the byte is as it was."""
    path, before = SHM_DIR / new_name(), bytes(range(64))
    path.touch(mode=0o600)
    seen: list[bytes] = []

    def wakes(pid: int, number: int) -> None:
        if number == signal.SIGCONT:
            seen.append(path.read_bytes())
            if meanwhile == "overwritten":
                path.write_bytes(b"\7" * 64)
            elif meanwhile == "removed":
                path.unlink()

    try:
        path.write_bytes(before)
        found = FoundProcess(int(path.name.split("-")[2]), "python")
        monkeypatch.setattr(job, "processes", lambda *parts: [found])
        monkeypatch.setattr(job, "wait_for", lambda what, seen, timeout_s: None)
        monkeypatch.setattr(faults, "send_signal", wakes)
        monkeypatch.setattr(faults, "CORRUPT_S", 0.0)
        faults.corrupt_bucket(job)
        assert sum(a != b for a, b in zip(seen[0], before, strict=True)) == 1
        if meanwhile != "removed":
            assert path.read_bytes() == (before if meanwhile == "nothing" else b"\7" * 64)
    finally:
        path.unlink(missing_ok=True)


def test_a_full_disk_is_recognised_by_a_line_of_the_trainer() -> None:
    spec = find_spec("recipe.async_pipeline")
    assert spec is not None and spec.submodule_search_locations is not None
    trainer = Path(spec.submodule_search_locations[0], "verl_bridge", "trainer", "checkpointing.py")
    assert faults.NO_CHECKPOINT in trainer.read_text(encoding="utf-8")
