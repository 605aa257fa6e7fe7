# SPDX-License-Identifier: Apache-2.0
"""Watches an event loop from a thread: one that does not turn has its stacks written, to `diagnosis.txt`.

The same thread writes the diagnoses that the loop makes itself, so that the loop never touches a file.

    thread: every look  ──► call on the loop ──► the loop answers ──► next look
                                └── no answer for `stalled_after_s`: stacks of all threads, one line for the
                                user
                                       └── nor does this thread run (a call holds the interpreter):
                                       faulthandler's does
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

from ..core.diagnosis import Diagnosis
from ..redaction import without_secrets

LOOKS = 8
"""How often it looks in the time after which a loop counts as stalled."""
CLOSE_S = 10.0
"""What a thread that writes to a disk that hangs gets at the end."""


class Watchdog:
    """Make it on the loop that it is to watch, as a context."""

    def __init__(
        self,
        path: Path,
        *,
        stalled_after_s: float,
        say: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`say` gets one line for the user, on whatever thread."""
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._path, self._say, self._now = path, say, now
        self._stalled_after_s = stalled_after_s
        self._answered_at = self._asked_at = now()
        self._asked = self._reported = False
        # faulthandler needs a file that is open already; where there was nothing to say, it goes again.
        self._file: IO[str] = path.open("a", encoding="utf-8")
        self._told: queue.SimpleQueue[Diagnosis | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._told.put(None)
        self._thread.join(CLOSE_S)

    def tell(self, diagnosis: Diagnosis) -> None:
        """Have it written, and its cause said."""
        self._told.put(diagnosis)

    def look(self) -> None:
        """Ask the loop to answer, or see for how long it has not. Called by the thread."""
        if not self._asked:
            if self._reported:
                self._reported = False
                self._say(f"the event loop turns again, after {self._answered_at - self._asked_at:.1f} s")
            self._asked, self._asked_at = True, self._now()
            try:
                self._loop.call_soon_threadsafe(self._answer)
            except RuntimeError:  # it is closed
                self._told.put(None)
            return
        silent_s = self._now() - self._asked_at
        if silent_s >= self._stalled_after_s and not self._reported:
            self._reported = True
            self._write(f"the event loop has not turned for {silent_s:.1f} s", stacks(self._loop_thread))

    def _answer(self) -> None:
        self._answered_at, self._asked = self._now(), False

    def _run(self) -> None:
        try:
            while True:
                # Begins anew with each look; this thread could not see that it is itself held up.
                faulthandler.dump_traceback_later(2 * self._stalled_after_s, file=self._file)
                try:
                    told = self._told.get(timeout=self._stalled_after_s / LOOKS)
                except queue.Empty:
                    self.look()
                    continue
                if told is None:
                    return
                self._write(f"a deadline has passed: {told.cause}", told.text)
        finally:
            faulthandler.cancel_dump_traceback_later()
            with contextlib.suppress(OSError):  # a disk that is full, which was said
                self._file.close()
                if self._path.stat().st_size == 0:
                    self._path.unlink()

    def _write(self, line: str, text: str) -> None:
        try:
            self._file.write(without_secrets(f"{line}\n\n{text}\n"))
            self._file.flush()
            self._say(f"{line}; {self._path.name} says more")
        except OSError as error:
            self._say(f"{line}; {self._path.name} cannot be written: {error}")


def stacks(first: int) -> str:
    """Where each thread of this process is, the one with the identity `first` before all others."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sorted(sys._current_frames().items(), key=lambda pair: pair[0] != first)
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in frames
    )
