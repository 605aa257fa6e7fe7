# SPDX-License-Identifier: Apache-2.0
"""Detecting recovery, and flipping a bit that is restored afterwards."""

from __future__ import annotations

import random

import pytest

from recipe.async_pipeline.soak import faults
from recipe.async_pipeline.soak.job import SoakFailed, SoakJob
from recipe.async_pipeline.soak.processes import Found
from recipe.async_pipeline.weight_sync.segment_names import SHM_DIR, new_name
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


def test_a_flipped_bit_is_restored_unless_overwritten(job: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    path = SHM_DIR / new_name()
    path.touch(mode=0o600)
    try:
        path.write_bytes(bytes(range(64)))
        pid = int(path.name.split("-")[2])
        monkeypatch.setattr(job, "processes", lambda part="": [Found(pid, "python")])
        assert faults._buckets(job) == [path.name]
        flipped = faults._flip(path.name, random.Random(1).random())
        assert flipped is not None
        assert sum(a != b for a, b in zip(path.read_bytes(), bytes(range(64)), strict=True)) == 1
        faults._heal(*flipped)
        assert path.read_bytes() == bytes(range(64))
        flipped = faults._flip(path.name, 0.5)
        assert flipped is not None
        path.write_bytes(b"\7" * 64)
        faults._heal(*flipped)
        assert path.read_bytes() == b"\7" * 64
    finally:
        path.unlink()
    faults._heal(*flipped)
