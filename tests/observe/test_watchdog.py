# SPDX-License-Identifier: Apache-2.0
"""The watchdog detects a blocked event loop, independent of what blocks it."""

from __future__ import annotations

import asyncio
import ctypes
import os
import select
import struct
import threading
from pathlib import Path

from recipe.async_pipeline.core.waits.diagnosis import Diagnosis
from recipe.async_pipeline.observe.watchdog import Watchdog, stacks
from tests import HANG_S


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_blocked_loop_is_reported_once_with_its_stack_and_its_recovery_too(tmp_path: Path) -> None:
    reported: list[str] = []
    clock = Clock()

    async def main() -> None:
        # Without entering the context, the test calls look() in place of the thread.
        dog = Watchdog(tmp_path / "diagnosis.txt", stalled_after_s=60, say=reported.append, now=clock)
        dog.look()
        await asyncio.sleep(0)
        dog.look()
        clock.now_s += 59.0
        dog.look()
        assert reported == [], "the last callback is younger than the limit"
        for _ in range(3):
            clock.now_s += 2.0
            dog.look()
        await asyncio.sleep(0)
        dog.look()
        with dog:  # its thread ends at once, and closes the file
            pass

    asyncio.run(main())
    assert reported == [
        "the event loop is blocked for 61.0 s; see diagnosis.txt",
        "the event loop runs again after 65.0 s",
    ]
    written = (tmp_path / "diagnosis.txt").read_text()
    assert written.startswith("the event loop is blocked for 61.0 s\n\nthread MainThread:\n")
    assert "in main" in written
    assert "dog.look()" in written


async def test_the_thread_detects_a_blocking_call(tmp_path: Path) -> None:
    reported = threading.Event()

    with Watchdog(tmp_path / "diagnosis.txt", stalled_after_s=0.02, say=lambda line: reported.set()):
        await asyncio.sleep(0)
        assert reported.wait(HANG_S), "this call blocks the loop until the watchdog has reported it"
    assert "reported.wait(HANG_S)" in (tmp_path / "diagnosis.txt").read_text()


async def test_a_call_that_holds_the_gil_is_detected_too(tmp_path: Path) -> None:
    """No Python code runs meanwhile; faulthandler's C thread writes the stacks.

    The file is a pipe, and the call that holds the GIL polls it in C, so the call ends as soon as stacks are
    written.
    """
    path = tmp_path / "diagnosis.txt"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    armed = threading.Event()

    class Armed(Watchdog):
        def look(self) -> None:
            armed.set()
            super().look()

    # By its own clock, which stands still, the watchdog's thread does not find the loop blocked before.
    with Armed(path, stalled_after_s=0.02, say=lambda line: None, now=lambda: 0.0):
        assert await asyncio.to_thread(armed.wait, HANG_S)
        assert (
            ctypes.PyDLL(None).poll(struct.pack("iHH", reader, select.POLLIN, 0), 1, int(HANG_S * 1000)) == 1
        )
    written = os.read(reader, 1 << 16).decode()
    os.close(reader)
    assert "Timeout (0:00:00.04" in written
    assert "test_watchdog.py" in written


async def test_a_diagnosis_is_written_and_its_cause_reported(tmp_path: Path) -> None:
    reported: list[str] = []

    with Watchdog(tmp_path / "diagnosis.txt", stalled_after_s=60, say=reported.append) as dog:
        dog.tell(Diagnosis("deadlock: a waits for b", "the wait graph: ..."))
    assert reported == ["timeout: deadlock: a waits for b; see diagnosis.txt"]
    assert "the wait graph: ..." in (tmp_path / "diagnosis.txt").read_text()


async def test_without_a_diagnosis_there_is_no_file(tmp_path: Path) -> None:
    with Watchdog(tmp_path / "diagnosis.txt", stalled_after_s=60, say=lambda line: None):
        await asyncio.sleep(0)
    assert os.listdir(tmp_path) == []


async def test_a_full_disk_loses_only_the_file(tmp_path: Path) -> None:
    reported: list[str] = []
    (tmp_path / "diagnosis.txt").symlink_to("/dev/full")

    with Watchdog(tmp_path / "diagnosis.txt", stalled_after_s=60, say=reported.append) as dog:
        dog.tell(Diagnosis("c", "t" * 100_000))
    assert reported == ["timeout: c; diagnosis.txt cannot be written: [Errno 28] No space left on device"]


async def test_a_closed_loop_ends_the_thread(tmp_path: Path) -> None:
    dog = Watchdog(tmp_path / "diagnosis.txt", stalled_after_s=60, say=lambda line: None)
    dog.look()
    with dog:
        pass
    assert not (tmp_path / "diagnosis.txt").exists()


def test_stacks_begin_with_the_requested_thread() -> None:
    at_work, done = threading.Event(), threading.Event()

    def wait_here() -> None:
        at_work.set()
        done.wait(HANG_S)

    thread = threading.Thread(target=wait_here, name="busy")
    thread.start()
    at_work.wait(HANG_S)
    assert thread.ident is not None
    text = stacks(thread.ident)
    done.set()
    thread.join()
    assert text.startswith("thread busy:\n")
    assert "in wait_here" in text
    assert "thread MainThread:" in text
