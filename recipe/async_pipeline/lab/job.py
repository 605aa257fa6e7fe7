# SPDX-License-Identifier: Apache-2.0
"""Run a job of this package: its command, its log, its processes, and its end.

Most jobs run under `async-pipeline watch`, which ends all processes of its command when it gets a signal. The
processes of the others are ended here.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from ..processes import descendants, end_all

ROOT = Path(__file__).resolve().parents[3]
"""The repository; its `configs/` and `run_scripts/` are not in the wheel."""
LOOK_S = 1.0
"""Interval at which `wait` calls `look`."""
_ERROR = re.compile(r"^\S*(?:Error|Exception|Violation|Timeout)\S*: .+")
_PRINTED_BY = re.compile(r"^\s*[\d.]+ s  |^\([^)]*pid=\d+[^)]*\) ?")
"""Prefixes that `watch` and Ray add to a line."""


def under_watch(*arguments: str) -> list[str]:
    """Return the command of Python with `arguments` under `watch`, which shows all of its lines."""
    watch = [sys.executable, "-m", "recipe.async_pipeline", "watch", "--verbose", "--"]
    return [*watch, sys.executable, *arguments]


def with_cpu_settings(command: Sequence[str]) -> list[str]:
    """Return a command that runs another with the settings of a machine without accelerator."""
    environment = ROOT / "run_scripts" / "cpu_env.sh"
    return ["bash", "-c", 'source "$0"; exec "$@"', str(environment), *command]


class JobProcess:
    """The process of a job, which writes to a log."""

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        *,
        own_session: bool = False,
        folder: Path | None = ROOT,
    ) -> None:
        """Start the command in `folder`, by default the repository, or in that of this process with None.

        `environment` is in addition to that of this process. `own_session`: Ctrl-C in the terminal does not
        reach the job.
        """
        self.log = log
        self._others = frozenset(_started())
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                cwd=folder,
                env={**os.environ, **environment},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=own_session,
            )
        self.pid = self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended; others that it started may be alive."""
        return self._process.poll() is not None

    def wait(self, limit_s: float, look: Callable[[float], object] = lambda passed_s: None) -> int:
        """Return the exit status. `look` gets the seconds of the wait now and then.

        Raises TimeoutError if the job does not end within `limit_s`; it continues to run.
        """
        started = time.monotonic()
        while (passed_s := time.monotonic() - started) <= limit_s:
            look(passed_s)
            try:
                return self._process.wait(min(LOOK_S, limit_s))
            except subprocess.TimeoutExpired:
                continue
        raise TimeoutError(f"still running after {limit_s:g} s; see {self.log}")

    def stop(self) -> None:
        """End a job under `watch`, which ends its processes first. No-op if it has ended."""
        self._process.terminate()
        self._process.wait()

    def kill(self) -> None:
        """Kill this process, and none that it started."""
        self._process.kill()
        self._process.wait()

    def end_tree(self) -> None:
        """End the process and all that it left behind: all descendants of this process since its start."""
        left = _started() - self._others
        if left:
            end_all(left, spared=self._others)
        else:
            self._process.kill()
        self._process.wait()


def _started() -> set[int]:
    """Return the descendants of this process; none without psutil, so that `verify-gpu` can say so."""
    return set(descendants(os.getpid())) if find_spec("psutil") else set()


def last_error(log: str) -> str:
    """Return the last line of a log that names an exception, without prefixes, at most 300 characters."""
    lines = (_PRINTED_BY.sub("", _PRINTED_BY.sub("", line)).strip() for line in log.splitlines())
    found = [line for line in lines if _ERROR.match(line)]
    return found[-1][:300] if found else "no exception in the log"


class FoundProcess(NamedTuple):
    """A process that is alive."""

    pid: int
    command: str


EXEC_S = 0.5
"""Seconds for which a process without an environment or a command line may be in the middle of an exec."""


def processes_with(name: str, value: str) -> list[FoundProcess]:
    """Return the live processes, among those readable by this user, with the environment variable set.

    All processes of a job inherit its variables.
    """
    import psutil  # not at the top: `verify-gpu` must be able to say that it is missing

    # A shell that starts has a zero in place of each `=` for a moment.
    wanted = f"\0{name}={value}\0".encode().replace(b"=", b"\0")
    found = []

    for pid in psutil.pids():
        folder = Path("/proc", str(pid))
        try:
            # Not `environ()`: it ends where a process that changed its title has overwritten the block.
            environment = _read_outside_exec(folder, "environ")
            has = wanted in b"\0%b\0" % environment.replace(b"=", b"\0")
            if has and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                command = _read_outside_exec(folder, "cmdline").replace(b"\0", b" ")
                found.append(FoundProcess(pid, command.decode(errors="replace").strip()))
        except (OSError, psutil.Error):
            continue
    return found


def _read_outside_exec(folder: Path, name: str) -> bytes:
    """Return a file of a process in /proc.

    In the middle of an exec, environment and command line are empty; they may also be empty for good. Raises
    OSError if the process has ended, is a zombie or belongs to the kernel.
    """
    until = time.monotonic() + EXEC_S
    while not (content := (folder / name).read_bytes()) and time.monotonic() < until:
        (folder / "exe").readlink()
        time.sleep(0.001)
    return content
