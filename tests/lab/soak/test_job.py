# SPDX-License-Identifier: Apache-2.0
"""Reading events while they are written."""

from __future__ import annotations

import pytest

from tests.fakes.soak_run import Run, record


def test_only_complete_events_are_read(job: Run) -> None:
    assert job.read() == []
    job.write(record("GATHERED", version=1), end="")
    assert job.read() == []
    job.write(end="\n")
    assert [r["event"] for r in job.read()] == ["GATHERED"]
    job.write(record("SERVED", version=1, replicas=2), record("SERVED", version=2, replicas=2))
    assert job.newest_version() == 2


def test_wait_for_line_waits_for_a_line_of_the_log(job: Run) -> None:
    job.log.write_text("the disk is full\n")
    job.wait_for_line("is full", 0.0, since=0)
    with pytest.raises(TimeoutError, match="0 s without the line 'is full'"):
        job.wait_for_line("is full", 0.0, since=job.log.stat().st_size)


def test_the_event_file_of_the_previous_process_is_not_read(job: Run) -> None:
    job.write(record("SERVED", version=7, replicas=2))
    job._old_events = job._events.stat().st_ino
    assert job.newest_version() == -1
    job._events.rename(job.run_dir / "events.1.jsonl")
    job.write(record("SERVED", version=5, replicas=2))
    assert job.newest_version() == 5
