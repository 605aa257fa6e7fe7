# SPDX-License-Identifier: Apache-2.0
"""The event file has every record, in order and complete, even if the run fails."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from recipe.async_pipeline import AsyncTrainingFlow, redaction
from recipe.async_pipeline.core.events import LogRecord
from recipe.async_pipeline.core.waits.clock import run_virtual
from recipe.async_pipeline.observe.run_directory import event_file
from recipe.async_pipeline.observe.run_directory.event_file import EventFile
from recipe.async_pipeline.observe.run_directory.summary import write_atomically
from recipe.async_pipeline.tools.run_directory import read_events
from tests.fakes.trainer import SimTrainer


def record(number: int, **fields: Any) -> LogRecord:
    return LogRecord(
        t=float(number), role="train", event="TRAINED", state=None, fields={"step": number, **fields}
    )


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_records_are_one_object_per_line_in_order(tmp_path: Path) -> None:
    path = tmp_path / "run" / "events.jsonl"
    with EventFile(path) as write:
        for number in range(500):
            write(record(number))
    assert lines(path) == [record(number).as_dict() for number in range(500)]


def test_values_that_json_cannot_represent_become_text(tmp_path: Path) -> None:
    with EventFile(tmp_path / "events.jsonl") as write:
        write(record(1, path=Path("a/b"), why="two\nlines, ünïcode"))
    (line,) = lines(tmp_path / "events.jsonl")
    assert line["path"] == "a/b"
    assert line["why"] == "two\nlines, ünïcode"


def test_no_file_of_a_run_contains_a_secret_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide = redaction.hider_of({"HF_TOKEN": "hf_secret_0123"}, for_programs=True)
    monkeypatch.setattr(redaction, "_hider_of_this_process", lambda: hide)
    with EventFile(tmp_path / "events.jsonl") as write:
        write(record(1, why="ValueError: hf_secret_0123"))
    assert lines(tmp_path / "events.jsonl")[0]["why"] == "ValueError: ***"
    write_atomically(tmp_path / "summary.json", {"error": "hf_secret_0123 is wrong"})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"error": "*** is wrong"}


def test_an_error_in_the_run_closes_the_file(tmp_path: Path) -> None:
    file = EventFile(tmp_path / "events.jsonl")
    with pytest.raises(RuntimeError, match="broke"), file:
        file(record(1))
        raise RuntimeError("the run broke")
    assert len(lines(tmp_path / "events.jsonl")) == 1
    file.close()
    file.close()


def test_a_file_of_an_earlier_run_is_replaced(tmp_path: Path) -> None:
    for number in (1, 2):
        with EventFile(tmp_path / "events.jsonl") as write:
            write(record(number))
    assert [line["step"] for line in lines(tmp_path / "events.jsonl")] == [2]


def test_the_file_contains_the_log_of_a_whole_run(tmp_path: Path) -> None:
    flow = AsyncTrainingFlow(SimTrainer(max_lag=1))
    with EventFile(tmp_path / "events.jsonl") as write:
        flow.log.subscribe(write)
        run_virtual(flow.run())
    found = lines(tmp_path / "events.jsonl")
    assert found == [r.as_dict() for r in flow.log.records]
    assert all(isinstance(line["t"], float) and {"role", "event"} <= line.keys() for line in found)
    assert {"step", "version", "key", "state"} <= {name for line in found for name in line}


def test_append_terminates_an_incomplete_last_line(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    for torn in ("", '{"n": 1}\n{"n'):
        path.write_text(torn)
        with EventFile(path, append=True) as write:
            write(record(2))
        assert path.read_text() == (torn and torn + "\n") + json.dumps(record(2).as_dict()) + "\n"


def test_sync_writes_all_records(tmp_path: Path) -> None:
    with EventFile(tmp_path / "ledger.jsonl") as write:
        for number in range(500):
            write(record(number))
        write.sync()
        assert len(lines(tmp_path / "ledger.jsonl")) == 500


def test_sync_raises_the_error_of_a_full_disk() -> None:
    file = EventFile(Path("/dev/full"))
    file(record(1))
    with pytest.raises(OSError, match="/dev/full is not complete: No space left"):
        file.sync()
    file(record(2))
    file.close()


class Disk:
    """A disk that takes `room` more bytes, in place of the system's calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room = 1 << 30
        self.loses = False
        """Whether bytes that were taken turn out to be lost when they are to be on disk."""
        write = os.write

        def written(file: int, data: bytes) -> int:
            if not self.room:
                raise OSError(errno.ENOSPC, "No space left on device")
            taken = write(file, data[: self.room])
            self.room -= taken
            return taken

        def synced(file: int) -> None:
            if self.loses:
                raise OSError(errno.EDQUOT, "Disk quota exceeded")

        monkeypatch.setattr(os, "write", written)
        monkeypatch.setattr(os, "fsync", synced)


@pytest.mark.parametrize("room", [0, 1, 30, 77])
def test_a_moment_of_a_full_disk_costs_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    disk, failures, said = Disk(monkeypatch), list[Exception](), list[str]()
    with EventFile(tmp_path / "ledger.jsonl", on_failure=failures.append, tell=said.append) as write:
        disk.room = room
        for number in range(100):
            write(record(number))
        for _ in range(3):
            with pytest.raises(OSError, match="is not complete: No space left") as caught:
                write.sync()
            assert caught.value.errno == errno.ENOSPC
        write(record(100))
        disk.room = 1 << 30
        write.sync()
        assert lines(tmp_path / "ledger.jsonl") == [record(number).as_dict() for number in range(101)]
        write(record(101))
    assert len(lines(tmp_path / "ledger.jsonl")) == 102 and failures == []
    assert [line.partition(";")[0] for line in said] == ["ledger.jsonl waits for its disk"]


def test_records_that_a_file_system_lost_are_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    with EventFile(tmp_path / "ledger.jsonl") as write:
        write(record(1))
        write.sync()
        disk.loses = True
        write(record(2))
        with pytest.raises(OSError, match="is not complete: Disk quota exceeded"):
            write.sync()
        assert lines(tmp_path / "ledger.jsonl") == [record(1).as_dict()]
        disk.loses = False
        write(record(3))
        write.sync()
    assert lines(tmp_path / "ledger.jsonl") == [record(number).as_dict() for number in (1, 2, 3)]


def test_a_disk_that_stays_full_is_given_up_once_too_much_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, failures = Disk(monkeypatch), list[Exception]()
    monkeypatch.setattr(event_file, "KEPT_BYTES", 1000)
    with EventFile(tmp_path / "ledger.jsonl", on_failure=failures.append) as write:
        disk.room = 0
        for number in range(100):
            write(record(number))
        for _ in range(2):
            with pytest.raises(OSError, match="is not complete: No space left"):
                write.sync()
            write(record(100))
        disk.room = 1 << 30
        with pytest.raises(OSError, match="is not complete: No space left") as caught:
            write.sync()
        assert caught.value.errno == errno.ENODATA, "no checkpoint waits for it"
    assert [getattr(error, "errno", None) for error in failures] == [errno.ENOSPC]


def test_a_disk_that_is_full_at_the_end_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, failures = Disk(monkeypatch), list[Exception]()
    with EventFile(tmp_path / "events.jsonl", on_failure=failures.append) as write:
        disk.room = 0
        write(record(1))
    assert [getattr(error, "errno", None) for error in failures] == [errno.ENOSPC]


def test_an_incomplete_last_line_is_skipped_and_another_one_raises(tmp_path: Path) -> None:
    flow = AsyncTrainingFlow(SimTrainer(max_lag=1))
    run_virtual(flow.run())
    records = flow.log.records
    path = tmp_path / "events.jsonl"
    path.write_text("".join(json.dumps(r.as_dict()) + "\n" for r in records) + '{"t": 9')
    read = read_events(path)
    assert [r.as_dict() for r in read] == [r.as_dict() for r in records]
    path.write_text('{"t": 9\n{"t": 1.0, "role": "flow", "event": "DONE"}\n')
    with pytest.raises(json.JSONDecodeError):
        read_events(path)


class Unwritable:
    """A record that cannot become a line."""

    def as_dict(self) -> dict[str, Any]:
        raise KeyError("no such field")


def test_the_first_failure_is_reported_and_the_thread_lives(tmp_path: Path) -> None:
    failures: list[Exception] = []
    file = EventFile(tmp_path / "events.jsonl", on_failure=failures.append)
    file(record(1))
    for _ in range(3):
        file(Unwritable())
    with pytest.raises(OSError, match="is not complete: 'no such field'"):
        file.sync()
    file(record(2))
    file.close()
    assert [type(error) for error in failures] == [KeyError]
    assert lines(tmp_path / "events.jsonl") == [record(1).as_dict()]
