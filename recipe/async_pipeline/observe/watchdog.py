# SPDX-License-Identifier: Apache-2.0
"""Watch an event loop from a thread and write stack traces to `diagnosis.txt` if the loop is blocked.

The same thread writes the diagnoses that the loop makes itself, so that the loop never does file I/O.

    thread: each check ──► callback on the loop ──► the loop responds ──► next check
                └── no response for `stalled_after_s`: stacks of all threads, one line for the user
                       └── the thread cannot run either (a call holds the GIL): faulthandler writes the stacks
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO

from ..core.waits.diagnosis import Diagnosis
from ..redaction import without_secrets

LOOKS = 8
"""Number of checks within `stalled_after_s`."""
CLOSE_S = 10.0
"""Time limit for the thread at the end, in case the disk hangs."""


class Watchdog:
    """A context manager, to be created and entered on the event loop that it watches."""

    def __init__(
        self,
        path: Path,
        *,
        stalled_after_s: float = 60.0,
        say: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open `path`; `say` receives one line for the user and may be called from any thread."""
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._path, self._say, self._now = path, say, now
        self._stalled_after_s = stalled_after_s
        self._responded_at = self._asked_at = now()
        self._asked = self._reported = False
        # faulthandler needs an open file; __exit__ removes it if it stayed empty.
        self._file: IO[str] = path.open("a", encoding="utf-8")
        self._diagnoses: queue.SimpleQueue[Diagnosis | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._diagnoses.put(None)
        self._thread.join(CLOSE_S)

    def tell(self, diagnosis: Diagnosis) -> None:
        """Have the thread write a diagnosis and report its cause to the user."""
        self._diagnoses.put(diagnosis)

    def look(self) -> None:
        """Schedule a callback on the loop, or check how long the last one has been pending.

        Called by the thread.
        """
        if not self._asked:
            if self._reported:
                self._reported = False
                self._say(f"the event loop runs again after {self._responded_at - self._asked_at:.1f} s")
            self._asked, self._asked_at = True, self._now()
            try:
                self._loop.call_soon_threadsafe(self._respond)
            except RuntimeError:  # the loop is closed
                self._diagnoses.put(None)
            return

        blocked_s = self._now() - self._asked_at
        if blocked_s >= self._stalled_after_s and not self._reported:
            self._reported = True
            self._write(f"the event loop is blocked for {blocked_s:.1f} s", stacks(self._loop_thread))

    def _respond(self) -> None:
        self._responded_at, self._asked = self._now(), False

    def _run(self) -> None:
        try:
            while True:
                # Each check restarts this timer, which fires if a call holds the GIL and blocks this thread.
                faulthandler.dump_traceback_later(2 * self._stalled_after_s, file=self._file)
                try:
                    diagnosis = self._diagnoses.get(timeout=self._stalled_after_s / LOOKS)
                except queue.Empty:
                    self.look()
                    continue

                if diagnosis is None:
                    return
                self._write(f"timeout: {diagnosis.cause}", diagnosis.text)
        finally:
            faulthandler.cancel_dump_traceback_later()
            with contextlib.suppress(OSError):  # the disk is full, which _write reported
                self._file.close()
                if self._path.stat().st_size == 0:
                    self._path.unlink()

    def _write(self, line: str, text: str) -> None:
        try:
            self._file.write(without_secrets(f"{line}\n\n{text}\n"))
            self._file.flush()
            self._say(f"{line}; see {self._path.name}")
        except OSError as error:
            self._say(f"{line}; {self._path.name} cannot be written: {error}")


def stacks(first: int) -> str:
    """Return the stack of each thread of this process, the thread with identity `first` before all others."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sorted(sys._current_frames().items(), key=lambda pair: pair[0] != first)
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in frames
    )
