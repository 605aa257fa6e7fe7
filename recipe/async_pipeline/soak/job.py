# SPDX-License-Identifier: Apache-2.0
"""A run on the real stack that can be looked at, hurt, killed and started again."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..bench.runner import last_error
from ..bench.workload import CONFIGS
from ..errors import AsyncPipelineError
from .processes import Found, processes_with, send

MARK = "ASYNC_PIPELINE_SOAK"
POLL_S = 0.05
START_S = 600.0
STOP_S = 60.0
ENGINE, SERVER = "VLLM::EngineCore", "ray::PipelineVLLMServer"
Record = Mapping[str, Any]


class SoakFailed(AsyncPipelineError, RuntimeError):
    """The run ended, or did not recover, so that nothing more could be tried."""


class SoakJob:
    """One run directory, and the process that writes there; after a kill, the next one."""

    def __init__(self, folder: Path, overrides: Sequence[str], task: Path, seed: int) -> None:
        """`folder`: for the run directory, the log and whatever the faults need."""
        self.folder, self.run_dir, self.log = folder, folder / "run", folder / "job.log"
        self.random = random.Random(seed)
        """Which process is hurt, and where."""
        self._overrides, self._task = overrides, task
        self._process: subprocess.Popen[bytes] | None = None
        self._events = self.run_dir / "events.jsonl"
        self._read_to, self._rest = 0, b""
        self.records: list[Record] = []
        """Events of the process that runs, as far as they were read."""

    # Its life.

    def start(self) -> None:
        """Start, or go on from the last checkpoint."""
        environment = CONFIGS.parent / "run_scripts" / "cpu_env.sh"
        watch = [sys.executable, "-m", "recipe.async_pipeline", "watch", "--verbose", "--", sys.executable]
        config = ["--config-path", str(CONFIGS), "--config-name", "smoke_cpu", "+async_pipeline=True"]
        command = [
            "bash",
            "-c",
            'source "$0"; exec "$@"',
            str(environment),
            *watch,
            "-m",
            "verl.trainer.main_ppo",
            *config,
            *self._overrides,
        ]
        settings = {
            **os.environ,
            MARK: str(self.folder),
            "ASYNC_PIPELINE_TASK": str(self._task),
            "ASYNC_PIPELINE_RUN": "soak",
        }
        self._read_to, self._rest, self.records = 0, b"", []
        # What an earlier process wrote is set aside by the next one, but not at once.
        self._old_events = self._events.stat().st_ino if self._events.exists() else None
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, cwd=CONFIGS.parent, env=settings, stdout=log, stderr=log
            )

    def kill(self) -> None:
        """SIGKILL whoever would clean up, then everybody else. Nothing, if nothing is alive."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        while alive := self.processes():
            for found in alive:
                send(found.pid, signal.SIGKILL)
            time.sleep(POLL_S)

    def interrupt(self) -> int:
        """Ctrl-C; returns the exit status. Raises SoakFailed: it does not end."""
        assert self._process is not None
        self._process.send_signal(signal.SIGINT)
        try:
            return self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise SoakFailed(f"the run did not end within {STOP_S:g} s of Ctrl-C; see {self.log}") from None

    def check_alive(self) -> None:
        """Raises SoakFailed: the run ended by itself."""
        if self._process is None or self._process.poll() is not None:
            raise SoakFailed(
                f"the run ended by itself: {last_error(self.log.read_text(errors='replace'))}; see {self.log}"
            )

    # What can be seen of it.

    def processes(self, part: str = "") -> list[Found]:
        """Those whose command line holds a text."""
        return [found for found in processes_with(MARK, str(self.folder)) if part in found.command]

    def pick(self, part: str) -> Found:
        """One of them. Raises SoakFailed: there is none."""
        found = sorted(self.processes(part))
        if not found:
            raise SoakFailed(f"no process of the run is called {part}")
        return self.random.choice(found)

    def read(self) -> list[Record]:
        """Events that are new since the last time."""
        if not self._events.exists() or self._events.stat().st_ino == self._old_events:
            return []
        with self._events.open("rb") as file:
            file.seek(self._read_to)
            text = self._rest + file.read()
            self._read_to = file.tell()
        *lines, self._rest = text.split(b"\n")
        new = [json.loads(line) for line in lines]
        self.records += new
        return new

    def now(self) -> int:
        """The number of the next event of this process."""
        self.read()
        return len(self.records)

    def wait_for(
        self, what: str, seen: Callable[[Sequence[Record]], bool], timeout_s: float, since: int | None = None
    ) -> None:
        """Return when `seen` says so of the events of this process from `since` on, by default from now on.

        Raises SoakFailed: the run ended. TimeoutError: it goes on, but does not get there.
        """
        begin, deadline = self.now() if since is None else since, time.monotonic() + timeout_s
        while True:
            self.read()
            if seen(self.records[begin:]):
                return
            self.check_alive()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{timeout_s:g} s without {what}")
            time.sleep(POLL_S)

    def wait_for_line(self, text: str, timeout_s: float, since: int) -> None:
        """Return when a text is in the log behind this place. Raises as `wait_for`."""
        deadline = time.monotonic() + timeout_s
        while text.encode() not in self.log.read_bytes()[since:]:
            self.check_alive()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{timeout_s:g} s without the line {text!r}")
            time.sleep(POLL_S)

    def newest_version(self) -> int:
        """The newest that is served; -1: none yet, in this process."""
        self.read()
        return next((int(r["version"]) for r in reversed(self.records) if r["event"] == "SERVED"), -1)
