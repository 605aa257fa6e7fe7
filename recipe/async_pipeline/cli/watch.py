# SPDX-License-Identifier: Apache-2.0
"""`async-pipeline watch -- COMMAND`: run a training command, show its steps, log the rest, clean up.

Lines that start with our mark are shown on the terminal; all lines go to `run.log` in the run directory,
with secrets redacted. On Ctrl-C, on failure and at the end, all processes of the command are ended before
this returns, including orphans, which it adopts (PR_SET_CHILD_SUBREAPER). SIGHUP (a closed terminal) counts
as Ctrl-C, unless it was ignored at the start (nohup). SIGTERM is passed on, and the command may take
`faults.notice_s` for a checkpoint. The command learns our PID, and ends if we are killed
(`processes.end_with_ancestor`).

The run does not depend on its screen: a closed pipe, a full disk behind a redirect, or a terminal that is
stopped or lacks a character costs the shown lines and nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TextIO

from ..config.keys.overrides import explain_complaint
from ..config.knobs.schema import MOST_NOTICE_S
from ..console import write_whole
from ..observe.run_directory.run_files import set_aside
from ..observe.run_directory.summary import write_in_its_place, written_ns
from ..observe.table import MARK, TRANSIENT
from ..processes import WATCH_PID, adopt_orphans, descendants, end_all, end_signals, send_signal
from ..redaction import LineRedactor
from ..verl_bridge.rules.verl_keys import near_key
from ..weight_sync.memory.segment_names import sweep_orphans

STOP_S = 20.0
"""Seconds for an interrupted command to end by itself."""
QUIET_S = 20.0
"""Seconds without a shown line after which a line says that the run is alive."""
TAIL_LINES = 25
MOST_TEXTS = 10_000
"""Lines that wait for a terminal; more are only in run.log."""
SHOWN_S = 2.0
"""Seconds at the end for a terminal to take the lines that wait."""
_CLEAR_LINE = "\r\x1b[2K"
_ANSI_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_RUN_DIR = re.compile(re.escape(MARK) + r" run directory (.+)$")
_REPEATED = re.compile(r"\s*\[repeated \d+x across cluster\].*$")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `async-pipeline watch`."""
    parser.add_argument(
        "--verbose", action="store_true", help="show every line of the command, not only the pipeline's"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="the command to run")


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit status, or 130 after Ctrl-C."""
    command = [part for i, part in enumerate(args.command) if not (i == 0 and part == "--")]
    if not command:
        sys.stderr.write("async-pipeline watch: no command; write it after --\n")
        return 2
    if shutil.which(command[0]) is None:
        sys.stderr.write(
            f"async-pipeline watch: {command[0]} is not an executable program; correct the command after --\n"
        )
        return 2
    return Watcher(command, verbose=args.verbose).run()


class UnblockedOutput:
    """Writes to a stream in a thread: the caller does not wait for a terminal that is stopped."""

    def __init__(self, out: TextIO) -> None:
        # Not the stream: a thread that hangs must not hold the lock that Python takes at exit.
        self._descriptor, self._encoding = out.fileno(), out.encoding
        self.closed, self.isatty = out.closed, out.isatty
        # Its `put` may be interrupted by the handler of Ctrl-C, which calls it, too.
        self._texts = queue.SimpleQueue[str | None]()
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="screen", daemon=True)
        self._thread.start()

    def write(self, text: str) -> None:
        """Have a text written. Raises OSError if too many wait, or if one before could not be written."""
        if self._texts.qsize() >= MOST_TEXTS:
            raise OSError(f"{MOST_TEXTS} lines wait for the terminal")
        self._texts.put(text)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait at most SHOWN_S for the texts that are left."""
        self._texts.put(None)
        self._thread.join(SHOWN_S)

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # as in `Watcher._read`
        while (text := self._texts.get()) is not None:
            try:
                write_whole(self._descriptor, text.encode(self._encoding, "replace"))
            except OSError as error:
                self._error = error


class Screen:
    """Logs every line and decides which ones the user sees."""

    def __init__(self, out: TextIO | UnblockedOutput, started: float, *, verbose: bool = False) -> None:
        self._out = out
        self._started = started
        self._verbose = verbose
        self._redactor = LineRedactor(os.environ)
        self._early: list[str] = []
        self._log: TextIO | None = None
        self._filed = 0
        self._said = started
        self._shown = ""
        self._lost = 0
        self.log_path: Path | None = None
        self._run_dir: Path | None = None
        self._summary_ns: int | None = None
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.cause: str | None = None
        self._last_said = ""
        self.users_mistake = False

    def line(self, raw: str) -> None:
        """Process one line of the command's output."""
        text = self._redactor.line(_ANSI_COLOUR.sub("", raw.rstrip("\n")))
        if TRANSIENT in text:
            self._show(text[text.find(TRANSIENT) + len(TRANSIENT) + 1 :])
            return

        if found := _RUN_DIR.search(text):
            self._open(Path(found[1]))
        self._file(text)
        self.tail.append(text)
        if complaint := explain_complaint(text, near_key):
            self.cause, self.users_mistake = complaint, True

        mark = text.find(MARK)
        if mark >= 0:
            shown = _REPEATED.sub("", text[mark + len(MARK) + 1 :])
            if shown.startswith("cause: "):
                self.cause = shown.removeprefix("cause: ")
            self._last_said = shown
            self.say(shown)
        elif self._verbose:
            self.say(text)

    def say(self, text: str) -> None:
        """Show a line to the user, with the seconds since the start."""
        self._said = time.monotonic()
        shown = self._shown
        self._show("")
        self._print(f"{self._said - self._started:7.1f} s  {text}\n")
        self._show(shown)

    def _show(self, text: str) -> None:
        """Replace the last line of the terminal; no-op if the output is not a terminal."""
        if self._out.closed or not self._out.isatty() or text == self._shown:
            return
        width = shutil.get_terminal_size().columns - 1
        self._print(f"{_CLEAR_LINE if self._shown else ''}{text[:width]}")
        self._shown = text

    def _print(self, text: str) -> None:
        """Write to the screen. If it fails, only this text is lost, and run.log says so once."""
        try:
            self._out.write(text)
        except (OSError, ValueError) as error:  # ValueError: the stream is closed
            self._lost += 1
            if self._lost == 1:
                self._file(f"watch: a line cannot be shown ({error}); the run continues, this log has all")

    def reassure(self) -> None:
        """Show that the run is alive if no line was shown for QUIET_S."""
        if time.monotonic() - self._said >= QUIET_S:
            where = f" in {self.log_path.name}" if self.log_path else ""
            self.say(f"... running: {self._filed} line{'s' * (self._filed != 1)}{where} so far")

    def fail(self, status: int) -> None:
        """Show why a run failed and where its log is."""
        if self.cause is None and not any(MARK in line for line in list(self.tail)[-3:]):
            self._print("".join(f"    {line}\n" for line in self.tail))
        if self.cause is None and status - 128 in set(signal.Signals):
            number = signal.Signals(status - 128)
            hint = "; `dmesg` tells if memory was full" if number == signal.SIGKILL else ""
            self.cause = f"killed by {number.name}{hint}"
        where = f"; the whole log is {self.log_path}" if self.log_path else ""
        cause = f": {self.cause}" if self.cause else ""
        self.say(f"failed with status {status}{cause}{where}")
        # Only a refusal ends as a wrong use of a command, and it is the last line.
        refusal = self._last_said if status == 2 else ""
        self.summarize("failed", self.cause or refusal or f"status {status}")

    def summarize(self, status: str, error: str | None = None) -> None:
        """Write the summary of a run whose processes were killed before one of them did."""
        if self._run_dir is not None:
            write_in_its_place(self._run_dir, self._summary_ns, status, error)

    def close(self) -> None:
        """Close the log."""
        self._show("")
        if self._log is not None:
            self._log.close()

    def _open(self, run_dir: Path) -> None:
        """Open the log in the run directory and write the lines so far to it."""
        if self._log is None:
            self._run_dir, self._summary_ns = run_dir, written_ns(run_dir)
            path = run_dir / "run.log"
            try:
                set_aside(path)
                self._log = path.open("w", encoding="utf-8")
                self._log.writelines(f"{line}\n" for line in self._early)
                self.log_path = path
            except OSError as error:
                self._give_up_log(error)
            self._early.clear()

    def _file(self, text: str) -> None:
        """Write a line to the log, or keep it until the run directory is known."""
        self._filed += 1
        if self._log is None:
            self._early.append(text)
            return
        try:
            self._log.write(f"{text}\n")
            self._log.flush()
        except OSError as error:
            self._give_up_log(error)

    def _give_up_log(self, error: OSError) -> None:
        """Stop logging: a full disk must not stop the reading, or the command would block on its output."""
        with contextlib.suppress(OSError):
            self.close()
        self._log = Path(os.devnull).open("w", encoding="utf-8")
        self.say(f"run.log cannot be written any more: {error}")


class Watcher:
    """Runs one command and cleans up after it."""

    def __init__(self, command: Sequence[str], *, verbose: bool = False, out: TextIO = sys.stdout) -> None:
        self._command = list(command)
        self._started = time.monotonic()
        self._out = UnblockedOutput(out)
        self.screen = Screen(self._out, self._started, verbose=verbose)
        self._interrupts = 0
        self._process: subprocess.Popen[str] | None = None

    def run(self) -> int:
        """Run the command until it and all processes that it started are gone; return its status."""
        adopt_orphans()
        environment = {
            **os.environ,
            WATCH_PID: str(os.getpid()),
            # Lines are read as UTF-8, in any locale.
            "PYTHONIOENCODING": "utf-8",
            "ASYNC_PIPELINE_STARTED_UNIX": f"{time.time():.3f}",
            "PYTHONUNBUFFERED": "1",
        }

        # Set the handlers before the command starts: no Ctrl-C is missed, and the command gets Python's
        # default handlers even if this process was started with Ctrl-C ignored (a shell's background job).
        before = {sig: signal.signal(sig, self._stop) for sig in (signal.SIGINT, *end_signals())}
        process = self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            encoding="utf-8",
            errors="replace",
            env=environment,
        )

        assert process.stdout is not None
        reader = threading.Thread(target=self._read, args=(process.stdout,), name="reader", daemon=True)
        reader.start()

        try:
            status = self._wait(process)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for sig, handler in before.items():
                signal.signal(sig, handler)
            # Leftover processes hold the write end of the pipe: end them first, or the reader never ends.
            end_all(descendants(os.getpid()))
            sweep_orphans()
            reader.join()
        return self._close(status)

    def _wait(self, process: subprocess.Popen[str]) -> int:
        while True:
            try:
                return process.wait(QUIET_S)
            except subprocess.TimeoutExpired:
                self.screen.reassure()

    def _read(self, output: IO[str]) -> None:
        # Python handles signals in the main thread; a signal delivered to this thread would be delayed.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        for line in output:
            self.screen.line(line)

    def _close(self, status: int) -> int:
        if self._interrupts:
            self.screen.say("interrupted; all processes have ended")
            self.screen.summarize("interrupted")
            status = 130
        elif status:
            status = 2 if self.screen.users_mistake else status if status > 0 else 128 - status
            self.screen.fail(status)
        self.screen.close()
        self._out.close()
        return status

    def _stop(self, number: int, frame: object) -> None:
        if number == signal.SIGHUP and self._interrupts:
            return  # the kernel and a shell both send it; only a person asks twice
        self._interrupts += 1
        if self._interrupts == 1:
            self.screen.say("interrupted: ending the run (again to kill it)")
            passed_on, limit_s = signal.SIGINT, STOP_S
            if number == signal.SIGTERM:
                passed_on, limit_s = signal.SIGTERM, STOP_S + MOST_NOTICE_S
            if self._process is not None:
                send_signal(self._process.pid, passed_on)  # no-op if it has just ended
            signal.signal(signal.SIGALRM, lambda *_: end_all(descendants(os.getpid())))
            signal.setitimer(signal.ITIMER_REAL, limit_s)
        else:
            end_all(descendants(os.getpid()), patience_s=0.0)
