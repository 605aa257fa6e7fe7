# SPDX-License-Identifier: Apache-2.0
"""A run on the real stack that can be observed, damaged, killed and restarted."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import AsyncPipelineError
from ...processes import send_signal
from ..bench.inputs.workload import CONFIGS
from ..job import FoundProcess, JobProcess, last_error, processes_with, under_watch, with_cpu_settings

MARK = "ASYNC_PIPELINE_SOAK"
"""Environment variable that all processes of a run inherit."""
MOOD = "ASYNC_PIPELINE_MOOD"
"""Environment variable that names the control file of tools and agents; see `control_of`."""
POLL_S = 0.05
START_S = 600.0
"""Seconds for the run to start."""
NOTICE_S, STOP_S = 60.0, 120.0
"""Seconds that the run may take for a checkpoint after SIGTERM, and to its end after a signal."""
LEFT_S = 5.0
"""Seconds after the end of the run until a process of it counts as left behind."""
CLOCK = "ASYNC_PIPELINE_CLOCK"
"""Environment variable that names the file by which `stepped_clock.c` steps the clock."""
STANDINS = Path(__file__).with_name("standins")
"""A folder of modules that stand in for services."""
ENGINES = ("VLLM::EngineCore", "sglang::scheduler")
"""The processes that hold the weights and generate, of any engine."""
SERVERS = ("ray::PipelineVLLMServer", "ray::PipelineSGLangServer")
TEACHERS = ("ray::vLLMHttpServer", "ray::SGLangHttpServer")
RecordFields = Mapping[str, Any]


class SoakFailed(AsyncPipelineError, RuntimeError):
    """The run ended or did not recover, so no further fault can be injected."""


def run_dir_in(folder: Path) -> Path:
    """Return the run directory of a run. It is on the same disk as its checkpoints, which can be filled."""
    return folder / "disk" / "run"


def checkpoints_in(folder: Path) -> Path:
    """Return the folder of a run's checkpoints."""
    return folder / "disk" / "checkpoints"


def control_of(folder: Path) -> Path:
    """Return the file of a run that says how rewards, environments, tools or agents misbehave."""
    return folder / "mood"


class SoakJob:
    """One run directory and the process that currently writes to it."""

    def __init__(
        self, folder: Path, overrides: Sequence[str], task: Path, seed: int, preloaded: Path | None = None
    ) -> None:
        """Prepare a run. `folder` holds the disk of the run, its log and the files of the faults.

        `preloaded`: a library for all processes of the run.
        """
        self.folder, self.log, self.clock = folder, folder / "job.log", folder / "clock"
        self.run_dir, self.checkpoints = run_dir_in(folder), checkpoints_in(folder)
        self._screen = folder / "screen"
        self._reader: subprocess.Popen[bytes] | None = None
        self.random = random.Random(seed)
        """Chooses which process is hit, and where."""
        self._overrides, self._task, self._preloaded = overrides, task, preloaded
        self._process: JobProcess | None = None
        self._events = self.run_dir / "events.jsonl"
        self._read_to, self._rest = 0, b""
        self.records: list[RecordFields] = []
        """Events of the current process that were read so far."""

    # Life cycle.

    def start(self) -> None:
        """Start the run; it resumes from the last checkpoint if there is one."""
        self._read_to, self._rest, self.records = 0, b"", []

        # A new process renames the event file of the one before it, but only after a while.
        self._old_events = self._events.stat().st_ino if self._events.exists() else None
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
            # As by nohup: the run would inherit that, but a handler becomes the default in it.
            signal.signal(signal.SIGHUP, lambda *_: None)
        self._reader = self._start_reader()
        self._process = JobProcess(self.command, self._screen, self.environment)

    @property
    def command(self) -> list[str]:
        """The command of the run."""
        config = ["--config-path", str(CONFIGS), "--config-name", "smoke_cpu", "+async_pipeline=True"]
        return with_cpu_settings(under_watch("-m", "verl.trainer.main_ppo", *config, *self._overrides))

    def _start_reader(self) -> subprocess.Popen[bytes]:
        """Start the process that reads the run's output from a pipe, and writes the log."""
        if not self._screen.exists():
            os.mkfifo(self._screen)
            self.clock.write_bytes(bytes(8))
        with self.log.open("ab") as log:
            return subprocess.Popen(["cat", str(self._screen)], stdout=log)

    def close_output(self, patience_s: float = 0.0) -> None:
        """End the reader of the run's output; it may read to the end, which comes with that of the run."""
        if self._reader is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._reader.wait(patience_s)
            self._reader.kill()
            self._reader.wait()

    def run_again(self, limit_s: float) -> subprocess.CompletedProcess[str]:
        """Run the command of the run a second time. Raises SoakFailed if it does not end."""
        environment = {**os.environ, **self.environment}
        try:
            return subprocess.run(
                self.command,
                cwd=CONFIGS.parent,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise SoakFailed(f"a second launch did not end within {limit_s:g} s") from None

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables of processes that belong to the run."""
        return {
            MARK: str(self.folder),
            MOOD: str(control_of(self.folder)),
            "ASYNC_PIPELINE_TASK": str(self._task),
            "ASYNC_PIPELINE_RUN": "soak",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(STANDINS), os.environ.get("PYTHONPATH")))),
            CLOCK: str(self.clock),
            **({"LD_PRELOAD": str(self._preloaded)} if self._preloaded else {}),
        }

    def kill(self) -> None:
        """Kill all processes of the run with SIGKILL, `watch` first. No-op if none is alive."""
        if self._process is not None:
            self._process.kill()
        while alive := self.processes():
            for found in alive:
                send_signal(found.pid, signal.SIGKILL)
            time.sleep(POLL_S)
        self.close_output(LEFT_S)

    def end(self, number: signal.Signals) -> None:
        """End the run by a signal. Raises SoakFailed if it does not end, or leaves a process behind."""
        assert self._process is not None
        send_signal(self._process.pid, number)
        try:
            self._process.wait(STOP_S)
        except TimeoutError:
            self.kill()
            raise SoakFailed(
                f"the run did not end within {STOP_S:g} s of {number.name}; see {self.log}"
            ) from None
        left = self.left()
        self.close_output(LEFT_S)
        if left:
            raise SoakFailed(left[0])

    def left(self) -> list[str]:
        """Describe the processes of a run that ended, once none is left or `LEFT_S` have passed."""
        until = time.monotonic() + LEFT_S
        while (left := self.processes()) and time.monotonic() < until:
            time.sleep(POLL_S)
        return [f"process {one.pid} is left after the end of the run: {one.command[:120]}" for one in left]

    def check_alive(self) -> None:
        """Raise SoakFailed if the run ended by itself."""
        if self._process is None:
            raise SoakFailed("the run was not started")
        if self._process.has_ended:
            raise SoakFailed(f"the run ended by itself: {last_error(self._text())}; see {self.log}")

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

    def _text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def switched_off(self) -> list[str]:
        """Return the lines of the log about observers that were switched off."""
        return [
            line.strip() for line in self._text().splitlines() if "is switched off after an error" in line
        ]

    def newest_checkpoint(self) -> int:
        """Return the step of the newest complete checkpoint, or 0."""
        manifests = self.checkpoints.glob("global_step_*/manifest.json")
        return max((int(path.parent.name.rpartition("_")[2]) for path in manifests), default=0)

    def newest_version(self) -> int:
        """Return the newest version that the current process has served; -1 before the first one."""
        self.read()
        return next((int(r["version"]) for r in reversed(self.records) if r["event"] == "SERVED"), -1)


def served(versions: int) -> Callable[[Sequence[RecordFields]], bool]:
    """Return what accepts events if at least so many versions were served in them."""
    return lambda records: sum(record["event"] == "SERVED" for record in records) >= versions
