# SPDX-License-Identifier: Apache-2.0
"""Reading events while they are written."""

from __future__ import annotations

import signal

import pytest

from recipe.async_pipeline.lab.soak import job as module
from recipe.async_pipeline.lab.soak.job import SoakFailed
from tests import HANG_S
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
    job.start()
    assert job.newest_version() == -1
    (job.run_dir / "events.jsonl").rename(job.run_dir / "events.1.jsonl")
    job.write(record("SERVED", version=5, replicas=2))
    assert job.newest_version() == 5


def test_the_output_is_read_until_its_reader_ends(job: Run) -> None:
    """Also the output of the next process."""
    job.script = "echo one; exec sleep 1000"
    job.start()
    job.wait_for_line("one", HANG_S, since=0)
    job.end(signal.SIGTERM)
    echoes = "while echo two; do sleep 0.01; done 2>/dev/null"
    job.script = f"trap '' PIPE; {echoes}; echo blind > blind; exec sleep 1000"
    job.start()
    job.wait_for_line("two", HANG_S, since=0)
    assert job.log.read_text().startswith("one\ntwo\n")
    job.close_output()
    while not (job.folder / "blind").exists():
        assert job.processes()
    job.kill()
    assert job.processes() == []


def test_an_end_that_leaves_a_process_fails(job: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEFT_S", 0.0)
    begun = 'until [ "$(cat /proc/$!/comm)" = sleep ]; do sleep 0.01; done'
    job.script = (
        f"setsid sleep 1000 & {begun}; trap 'exit 1' TERM; echo ready; while true; do sleep 0.01; done"
    )
    job.start()
    job.wait_for_line("ready", HANG_S, since=0)
    with pytest.raises(SoakFailed, match="is left after the end of the run: sleep 1000"):
        job.end(signal.SIGTERM)


def test_a_second_launch_that_does_not_end_fails(job: Run) -> None:
    job.script = "echo refused; exit 2"
    ended = job.run_again(HANG_S)
    assert (ended.returncode, ended.stdout) == (2, "refused\n")
    job.script = "exec sleep 1000"
    with pytest.raises(SoakFailed, match="did not end within 0.01 s"):
        job.run_again(0.01)


def test_the_newest_complete_checkpoint_counts(job: Run) -> None:
    assert job.newest_checkpoint() == 0
    for step in (9, 10, 11):
        (job.checkpoints / f"global_step_{step}").mkdir(parents=True)
    (job.checkpoints / "global_step_9" / "manifest.json").touch()
    (job.checkpoints / "global_step_10" / "manifest.json").touch()
    assert job.newest_checkpoint() == 10
