# SPDX-License-Identifier: Apache-2.0
"""A board shows the whole of the last message; who waits for a version learns why it does not come."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from recipe.async_pipeline.errors import WeightSyncError
from recipe.async_pipeline.weight_sync.memory.board import Board, await_manifest
from recipe.async_pipeline.weight_sync.memory.manifest import Failure, Manifest, WeightTicket, encode
from recipe.async_pipeline.weight_sync.memory.segment_names import SHM_DIR
from tests import HANG_S


@pytest.fixture
def board() -> Iterator[Board]:
    made = Board()
    yield made
    made.close()
    assert not (SHM_DIR / made.name).exists()


def manifest(version: int) -> Manifest:
    return Manifest(version, (), (), ())


def ticket(board: Board, version: int = 3, pid: int | None = None) -> WeightTicket:
    return WeightTicket(version, board.name, os.getpid() if pid is None else pid, num_bytes=0, gather_s=0.0)


def test_the_last_message_is_read_by_name(board: Board) -> None:
    other = Board(board.name)
    assert other.read() is None
    for message in (b"one", b"two"):
        board.post(message)
        assert other.read() == message
    assert stat.S_IMODE((SHM_DIR / board.name).stat().st_mode) == 0o600
    other.close()


def test_a_reader_never_sees_a_part(board: Board) -> None:
    messages = [bytes([i]) * (1 << 16) for i in range(200)]
    seen: list[bytes] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            seen.append(Board(board.name).read() or b"")

    reader = threading.Thread(target=read)
    reader.start()
    for message in messages:
        board.post(message)
    done.set()
    reader.join()
    assert set(seen) <= {*messages, b""}


@pytest.mark.parametrize("name", ["psm_foreign", "../etc/passwd", "/etc/passwd"])
def test_a_name_in_another_format_is_not_opened(name: str) -> None:
    with pytest.raises(WeightSyncError, match="is not the name of a segment of this package"):
        Board(name)


def test_a_version_is_awaited(board: Board) -> None:
    later = threading.Timer(0.02, board.post, (encode(manifest(3)),))
    later.start()
    assert await_manifest(ticket(board), timeout_s=HANG_S) == manifest(3)


@pytest.mark.parametrize(
    ("posted", "reason"),
    [
        (encode(manifest(5)), "v3 is no longer in memory; v5 took its place"),
        (encode(Failure("OSError: gone")), "v3 was gathered, but its announcement failed: OSError: gone"),
        (b"nonsense", "not a weight manifest"),
        (None, "v3 was gathered, but process .* did not finish its checksums within 0.01 s"),
    ],
)
def test_a_version_that_does_not_come(board: Board, posted: bytes | None, reason: str) -> None:
    if posted is not None:
        board.post(posted)
    with pytest.raises(WeightSyncError, match=reason):
        await_manifest(ticket(board), timeout_s=0.01)


def test_a_trainer_that_is_killed_in_the_middle_is_named_at_once(board: Board) -> None:
    trainer = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    with trainer:
        trainer.send_signal(signal.SIGKILL)
    with pytest.raises(
        WeightSyncError, match=f"the trainer's process {trainer.pid} died before v3 was complete"
    ):
        await_manifest(ticket(board, pid=trainer.pid), timeout_s=HANG_S)


def test_what_a_dead_trainer_has_posted_still_counts(board: Board) -> None:
    board.post(encode(manifest(3)))
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    assert await_manifest(ticket(board, pid=ended.pid), timeout_s=HANG_S) == manifest(3)
