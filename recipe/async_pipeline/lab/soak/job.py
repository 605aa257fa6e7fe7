# SPDX-License-Identifier: Apache-2.0
"""A run on the real stack that can be observed, damaged, killed and restarted."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import AsyncPipelineError
from ...processes import send_signal
from ..bench.workload import CONFIGS
from ..job import FoundProcess, JobProcess, processes_with, under_watch, with_cpu_settings

MARK = "ASYNC_PIPELINE_SOAK"
"""Environment variable that all processes of a run inherit."""
MOOD = "ASYNC_PIPELINE_MOOD"
"""Environment variable that names the control file of tools and agents; see `control_of`."""
POLL_S = 0.05
START_S = 600.0
"""Seconds for the run to start."""
STOP_S = 60.0
"""Seconds for the run to end after Ctrl-C."""
ENGINES = ("VLLM::EngineCore", "sglang::scheduler")
"""The processes that hold the weights and generate, of any engine."""
SERVERS = ("ray::PipelineVLLMServer", "ray::PipelineSGLangServer")
RecordFields = Mapping[str, Any]


class SoakFailed(AsyncPipelineError, RuntimeError):
    """The run ended or did not recover, so no further fault can be injected."""


def control_of(folder: Path) -> Path:
    """Return the file of a run that says how rewards, environments, tools or agents misbehave."""
    return folder / "mood"


class SoakJob:
    """One run directory and the process that currently writes to it."""

    def __init__(self, folder: Path, overrides: Sequence[str], task: Path, seed: int) -> None:
        """Prepare a run. `folder` holds the run directory, the log and the files of the faults."""
        self.folder, self.run_dir, self.log = folder, folder / "run", folder / "job.log"
        self.random = random.Random(seed)
        """Chooses which process is hit, and where."""
        self._overrides, self._task = overrides, task
        self._process: JobProcess | None = None
        self._events = self.run_dir / "events.jsonl"
        self._read_to, self._rest = 0, b""
        self.records: list[RecordFields] = []
        """Events of the current process that were read so far."""

    # Life cycle.

    def start(self) -> None:
        """Start the run; it resumes from the last checkpoint if there is one."""
        config = ["--config-path", str(CONFIGS), "--config-name", "smoke_cpu", "+async_pipeline=True"]
        strict = "trainer.v1.async_pipeline.faults.strict_observers=True"
        job = under_watch("-m", "verl.trainer.main_ppo", *config, strict, *self._overrides)

        self._read_to, self._rest, self.records = 0, b"", []

        # A new process renames the event file of the one before it, but only after a while.
        self._old_events = self._events.stat().st_ino if self._events.exists() else None
        self._process = JobProcess(with_cpu_settings(job), self.log, self.environment, append=True)

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables of processes that belong to the run."""
        return {
            MARK: str(self.folder),
            MOOD: str(control_of(self.folder)),
            "ASYNC_PIPELINE_TASK": str(self._task),
            "ASYNC_PIPELINE_RUN": "soak",
        }

    def kill(self) -> None:
        """Kill all processes of the run with SIGKILL, `watch` first. No-op if none is alive."""
        if self._process is not None:
            self._process.kill()
        while alive := self.processes():
            for found in alive:
                send_signal(found.pid, signal.SIGKILL)
            time.sleep(POLL_S)

    def interrupt(self) -> int:
        """Send Ctrl-C and return the exit status. Raises SoakFailed if the run does not end."""
        assert self._process is not None
        self._process.interrupt()
        try:
            return self._process.wait(STOP_S)
        except TimeoutError:
            self.kill()
            raise SoakFailed(f"the run did not end within {STOP_S:g} s of Ctrl-C; see {self.log}") from None

    def check_alive(self) -> None:
        """Raise SoakFailed if the run ended by itself."""
        if self._process is None:
            raise SoakFailed("the run was not started")
        if self._process.has_ended:
            raise SoakFailed(f"the run ended by itself: {self._process.last_error()}; see {self.log}")

    # Observation.

    def processes(self, *parts: str) -> list[FoundProcess]:
        """Return the live processes whose command line contains one of `parts`, or all without any."""
        alive = processes_with(MARK, str(self.folder))
        return [one for one in alive if not parts or any(part in one.command for part in parts)]

    def pick(self, *parts: str) -> FoundProcess:
        """Return a random process with one of `parts` in its command line. Raises SoakFailed without one."""
        found = sorted(self.processes(*parts))
        if not found:
            raise SoakFailed(f"no process of the run has {' or '.join(parts)} in its command line")
        return self.random.choice(found)

    def read(self) -> list[RecordFields]:
        """Return the events since the last call."""
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
        """Return the index of the current process's next event."""
        self.read()
        return len(self.records)

    def wait_for(
        self,
        what: str,
        seen: Callable[[Sequence[RecordFields]], bool],
        timeout_s: float,
        since: int | None = None,
    ) -> None:
        """Return once `seen` accepts the events from index `since` on; the default is from this call on.

        Raises SoakFailed if the run ended, TimeoutError if `seen` does not accept within `timeout_s`.
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
        """Return once the log contains `text` after byte `since`. Raises as `wait_for`."""
        deadline = time.monotonic() + timeout_s
        while text.encode() not in self.log.read_bytes()[since:]:
            self.check_alive()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{timeout_s:g} s without the line {text!r}")
            time.sleep(POLL_S)

    def newest_version(self) -> int:
        """Return the newest version that the current process has served; -1 before the first one."""
        self.read()
        return next((int(r["version"]) for r in reversed(self.records) if r["event"] == "SERVED"), -1)
