# SPDX-License-Identifier: Apache-2.0
"""Run the tiers of the tests: the default ones in three lanes side by side, or some, one after the other.

    python -m tests.lanes [TIER...]     `bash run_scripts/test.sh` prepares the environment, then calls this

Each line of a lane is shown at once, with the name of the lane. If nothing but tests has failed, in at most
`FILES_AGAIN` files, these tests run once again in a new process after all lanes have ended: what
passes then is listed as FLAKY with its first failure, and does not fail the run. SIGTERM, SIGINT and SIGHUP
end every process of every lane, after the stacks of the tests that were running.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import psutil

from recipe.async_pipeline.lab.job import processes_with
from recipe.async_pipeline.processes import adopt_orphans, descendants, end_all
from tests import OUTPUT, REPOSITORY

FILES_AGAIN = 3
"""More files with failures than this are no accident, so nothing runs again."""
SILENT_S = 300.0
"""Seconds without a line of a lane after which its current test is printed."""
DRAIN_S = 10.0
"""Seconds for the last lines of a process that has ended, and for the stacks of one that is ended."""
OUTPUT_LINES = 20
"""Lines of a job's output that are shown if its test is ended."""
MOMENT_S = 3.0
"""Seconds for processes that end with the one that started them."""
MARK = "ASYNC_PIPELINE_LANE"
"""Environment variable that all processes of a lane inherit."""
BIN = Path(sys.executable).parent
GUARD = """
import shutil, sys
from recipe.async_pipeline.lab.job import processes_with
from recipe.async_pipeline.processes import end_all
mark, value, folder = sys.argv[1:]
sys.stdin.read()
end_all([found.pid for found in processes_with(mark, value)])
shutil.rmtree(folder, ignore_errors=True)
"""
"""Ends all processes of a run that was killed, and removes its folder. Reads until the run has ended."""


class Stage(NamedTuple):
    """A command of a lane."""

    name: str
    command: Sequence[str]
    of_tests: bool = False
    """Whether the command is pytest with `tests.live`, so that failures may run again."""
    decides: bool = True
    """Whether its failure fails the run; otherwise it is only shown."""
    files: Sequence[str] = ()
    """What pytest collects, if not everything; failed tests take their place when they run again."""


def pytest_stage(name: str, *options: str, live: str = "tests", files: Sequence[str] = ()) -> Stage:
    """Return a session of pytest with these options and files. `live`: see `tests.live`."""
    # `tests.live` shows each failure when it happens, so pytest need not at the end.
    quiet = (
        "-q",
        "--tb=short",
        "--no-summary",
        "-rN",
        "--disable-warnings",
        "-o",
        "console_output_style=classic",
    )
    command = (sys.executable, "-m", "pytest", "-p", "tests.live", "--live", live, *quiet)
    cache = ("-o", f"cache_dir=.cache/pytest/{name}")
    return Stage(name, (*command, *cache, *options), of_tests=True, files=files)


def files_with(mark: str) -> Sequence[str]:
    """Return the files of tests with this mark: a session that gets no others imports no others."""
    files = sorted((REPOSITORY / "tests").rglob("test_*.py"))
    return [str(file.relative_to(REPOSITORY)) for file in files if f"mark.{mark}" in file.read_text("utf-8")]


def ruff_stage(name: str, rules: str) -> Stage:
    return Stage(
        name, (sys.executable, "-m", "ruff", "check", "--output-format", "concise", "--select", rules, ".")
    )


STYLE = (
    ruff_stage("ruff's style", "E501,I,UP,C901,PLR0915"),
    Stage("ruff format", (sys.executable, "-m", "ruff", "format", "--check", ".")),
    Stage("codespell", (str(BIN / "codespell"),)),
    Stage("shellcheck", ("bash", "-c", f"'{BIN}/shellcheck' .ci/run run_scripts/*.sh")),
    pytest_stage("style", "-m", "style", live="files", files=("tests/style",)),
)
CHECKS = (
    ruff_stage("ruff", "F,B,ASYNC,BLE,RUF006,T201"),
    Stage("mypy", (sys.executable, "-m", "mypy")),
)
WHEEL = Stage("wheel", ("bash", "run_scripts/wheel.sh", sys.executable))
UNIT = (
    # Without it, and without Chromium, two tests are skipped.
    Stage("trace processor", ("bash", "run_scripts/trace_processor.sh"), decides=False),
    pytest_stage("unit", "-m", "not e2e and not real_engine and not nightly and not style", live="files"),
)
ENGINE = pytest_stage(
    "engine", "-m", "real_engine and not e2e and not nightly", files=files_with("real_engine")
)
PROBES = pytest_stage("probes", "-m", "e2e and probe and not nightly", files=files_with("probe"))
JOBS = pytest_stage("jobs", "-m", "e2e and not probe and not nightly", files=files_with("e2e"))
FAST = "not e2e and not real_engine and not nightly and not style and not slow"
HALF = ("tests/tools", "tests/verl_bridge", "tests/weight_sync")
"""Folders with about half of the seconds of the fast tests."""
QUICK = pytest_stage("quick", "-m", FAST, *(f"--ignore={folder}" for folder in HALF), live="files")
QUICK_HALF = pytest_stage("quick, other half", "-m", FAST, live="files", files=HALF)

TIERS: Mapping[str, Sequence[Stage]] = {
    "style": STYLE,
    "checks": CHECKS,
    "lint": (*STYLE, *CHECKS, WHEEL),
    "unit": UNIT,
    "engine": (ENGINE,),
    "e2e": (PROBES, JOBS),
    "nightly": (pytest_stage("nightly", "-m", "nightly"),),
    "nightly-part": (pytest_stage("a part of nightly", "-m", "nightly", "--nightly-part"),),
}
Lanes = Mapping[str, Sequence[Stage]]
SHOWN: Lanes = {"style": [stage._replace(decides=False) for stage in STYLE]}
"""Before the other lanes: style is shown, and does not decide."""
DEFAULT: Lanes = {"jobs": (JOBS, PROBES), "unit": (*CHECKS, WHEEL, *UNIT), "engine": (ENGINE,)}
"""The whole jobs keep more than one core busy only while they start, and each other lane uses one."""
ORDER: Mapping[str, Sequence[Lanes]] = {
    "": (SHOWN, DEFAULT),
    "quick": ({"unit": (QUICK,), "lint": (*STYLE, *CHECKS, QUICK_HALF)},),
}
"""What runs without a tier, and with `quick`: groups of lanes, one group after the other."""


@dataclass
class Ended:
    """A stage that has ended."""

    stage: Stage
    status: int
    seconds: float
    outcomes: dict[str, str] = field(default_factory=dict)
    """By test: passed, failed or skipped."""
    durations: dict[str, float] = field(default_factory=dict)
    """Seconds by test, with the fixtures that it was the first to need."""
    failures: dict[str, str] = field(default_factory=dict)
    """The first failure of each test that failed."""
    broken: bool = False
    """Whether a file could not be collected."""
    unfinished: str | None = None
    """The test in which the process ended."""
    reached_end: bool = False
    """Whether the session of pytest ended before its process."""

    @property
    def passed(self) -> bool:
        """Whether all is well: a test may end its process with status 0."""
        return self.status == 0 and (self.reached_end or not self.stage.of_tests)

    @property
    def failed_by_tests_only(self) -> bool:
        told = self.stage.of_tests and self.status == 1 and bool(self.failures)
        return told and self.reached_end and not self.broken

    @property
    def why(self) -> str:
        """Why it failed, if it was not by tests only."""
        early = " before the end of its session" if self.stage.of_tests and not self.reached_end else ""
        return f"exit status {self.status}{early}{f', in {self.unfinished}' if self.unfinished else ''}"


class Killed(BaseException):
    """A signal asks the run to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Run:
    """Lanes that run side by side, their output, and their end."""

    def __init__(self, show: Callable[[str], object]) -> None:
        """`show` gets each line, from several threads."""
        self._show = show
        self._lock = threading.Lock()
        self._folder = Path(tempfile.mkdtemp(prefix="lanes."))
        self._mark = self._folder.name
        self._guard = subprocess.Popen(
            [sys.executable, "-c", GUARD, MARK, self._mark, str(self._folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._lanes: dict[str, _Lane] = {}
        self.ended: list[Ended] = []
        self.seconds: dict[str, float] = {}
        """The time of each lane."""

    def say(self, text: str) -> None:
        with self._lock:
            for line in text.splitlines() or [""]:
                self._show(line)

    def run(self, lanes: Lanes) -> list[Ended]:
        """Run the lanes side by side, the stages of each one after the other; return the stages."""
        width = max(map(len, lanes)) if len(lanes) > 1 else 0
        self._lanes = {
            name: _Lane(
                name,
                stages,
                self._folder,
                self._mark,
                partial(self._say_of, name, width),
            )
            for name, stages in lanes.items()
        }
        for lane in self._lanes.values():
            lane.start()
        for lane in self._lanes.values():
            while not lane.over.wait(1.0):
                self._reap()
                for other in self._lanes.values():
                    other.say_if_silent()
        ended = [one for lane in self._lanes.values() for one in lane.ended]
        self.seconds |= {name: sum(one.seconds for one in lane.ended) for name, lane in self._lanes.items()}
        self.ended += ended
        for lane in self._lanes.values():
            if lane.error is not None:
                raise lane.error
        return ended

    def _reap(self) -> None:
        """Reap adopted orphans, as init does: tests wait until a process is gone."""
        with ExitStack() as stack:
            own = {self._guard.pid, *(stack.enter_context(lane.held()) for lane in self._lanes.values())}
            for child in psutil.Process().children():
                with suppress(psutil.Error, ChildProcessError):
                    if child.pid not in own and child.status() == psutil.STATUS_ZOMBIE:
                        os.waitpid(child.pid, os.WNOHANG)

    def _say_of(self, lane: str, width: int, text: str) -> None:
        self.say(f"{lane:{width}} | {text}" if width else text)

    def end(self) -> None:
        """End all processes of all lanes, after the stacks of their tests, and say which tests these were."""
        running = [lane for lane in self._lanes.values() if not lane.over.is_set()]
        places = [lane.place for lane in running]
        for lane in running:
            lane.give_up()
        for lane in running:
            lane.over.wait(DRAIN_S)
        spared = [self._guard.pid]
        end_all([found.pid for found in processes_with(MARK, self._mark)], spared=spared)
        end_all([pid for pid in descendants(os.getpid()) if pid not in spared], spared=spared)
        for lane, place in zip(running, places, strict=True):
            lane.over.wait(DRAIN_S)
            lane.show_output()
            self.say(f"{lane.name} was in {place}")

    def close(self) -> None:
        """End what the lanes have left behind, and say so; remove their folders."""
        deadline = time.monotonic() + MOMENT_S
        while (left := processes_with(MARK, self._mark)) and time.monotonic() < deadline:
            time.sleep(0.1)
        for found in left:
            self.say(f"left behind by a test, now ended: {found.pid} {found.command[:120]}")
        end_all([found.pid for found in left])
        shutil.rmtree(self._folder, ignore_errors=True)
        self._guard.communicate()


class _Lane(threading.Thread):
    """One lane: the process of its current stage, and the stages that ended."""

    def __init__(
        self, name: str, stages: Sequence[Stage], folder: Path, mark: str, say: Callable[[str], None]
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._stages, self._say = stages, say
        self._folder = folder / name
        self._output = self._folder / "output"
        self._environment = {
            **os.environ,
            # No lane finds the clusters of another.
            "RAY_TMPDIR": str(self._folder),
            # Files of processes that are killed go with the folder; pytest keeps its own ones elsewhere.
            "TMPDIR": str(self._folder),
            "PYTEST_DEBUG_TEMPROOT": tempfile.gettempdir(),
            # By default 15, with which jobs stand still while other lanes keep the cores busy.
            "RAY_worker_niceness": "0",
            MARK: mark,
            OUTPUT: str(self._output),
        }
        self._process: subprocess.Popen[str] | None = None
        self._record: Path | None = None
        self._stage: Stage | None = None
        self._since = self._heard = time.monotonic()
        self._given_up, self._starting = False, threading.Lock()
        self.over = threading.Event()
        """Set at the end of the lane. Unlike `join`, waiting for it survives the exception of a signal."""
        self.ended: list[Ended] = []
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self._folder.mkdir(exist_ok=True)
            for number, stage in enumerate(self._stages):
                self._stage, self._record = stage, self._folder / f"{number}.jsonl"
                self._since = time.monotonic()
                process = self._start(stage, self._record)
                if process is None:
                    return
                self.ended.append(self._finish(stage, self._record, process))
        except Exception as error:  # noqa: BLE001  # the main thread raises it
            self.error = error
        finally:
            self.over.set()

    def _start(self, stage: Stage, record: Path) -> subprocess.Popen[str] | None:
        """Return the process of a stage, or None if no further one may start."""
        command = [*stage.command, *(("--record", str(record)) if stage.of_tests else ()), *stage.files]
        with self._starting:
            if self._given_up:
                return None
            self._say(f"== {stage.name}")
            self._process = subprocess.Popen(
                command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            return self._process

    def _finish(self, stage: Stage, record: Path, process: subprocess.Popen[str]) -> Ended:
        reader = threading.Thread(target=self._read, args=(process,), daemon=True)
        reader.start()
        status = process.wait()
        reader.join(DRAIN_S)
        seconds = time.monotonic() - self._since
        ended = Ended(stage, status, seconds)
        _read_record(record, ended)
        ended.unfinished = _current_test(record)
        verdict = "passed" if ended.passed else "FAILED"
        self._say(
            f"== {stage.name}: {verdict}{'' if stage.decides else ' (does not decide)'}, {seconds:.0f} s"
        )
        return ended

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._heard = time.monotonic()
            self._say(line.rstrip("\n"))

    @contextmanager
    def held(self) -> Iterator[int | None]:
        """Start no stage inside; yields the process of the current one."""
        with self._starting:
            yield self._process.pid if self._process is not None else None

    @property
    def place(self) -> str:
        """The stage, its current test, and the seconds since the stage began."""
        if self._stage is None:
            return "no stage"
        test = _current_test(self._record)
        since = f"{time.monotonic() - self._since:.0f} s since the start of {self._stage.name}"
        return f"{test or self._stage.name}, {since}"

    def show_output(self) -> None:
        """Show the last lines of the job that a test was running."""
        if self._output.exists():
            for line in self._output.read_text(encoding="utf-8").splitlines()[-OUTPUT_LINES:]:
                self._say(line)

    def say_if_silent(self) -> None:
        if not self.over.is_set() and time.monotonic() - self._heard > SILENT_S:
            self._heard = time.monotonic()
            self._say(f"no line for {SILENT_S:g} s; in {self.place}")

    def give_up(self) -> None:
        """Start no further stage, and end the process of this one; pytest prints its stacks."""
        with self._starting:
            self._given_up = True
        if self._process is not None and self._process.poll() is None:
            of_tests = self._stage is not None and self._stage.of_tests
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGABRT if of_tests else signal.SIGTERM)


def _events(record: Path | None) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of a record."""
    if record is None or not record.exists():
        return
    for line in record.read_text(encoding="utf-8").splitlines():
        with suppress(ValueError):  # a line that was being written when its process was killed
            yield json.loads(line)


def _current_test(record: Path | None) -> str | None:
    """Return the test that has begun and not ended, or None between two tests."""
    current = None
    for event in _events(record):
        if "start" in event:
            current = event["start"]
        elif "outcome" in event:
            current = None
    return current


def _read_record(record: Path, ended: Ended) -> None:
    for event in _events(record):
        if "failure" in event:
            ended.failures.setdefault(event["test"], event["failure"])
        elif "outcome" in event:
            ended.outcomes[event["test"]] = event["outcome"]
            ended.durations[event["test"]] = float(event["seconds"])
        elif "error" in event:
            ended.broken = True
        elif "end" in event:
            ended.reached_end = True


@dataclass
class Verdict:
    """The result of a run, after failed tests have run again."""

    failed: dict[str, str] = field(default_factory=dict)
    """By test or stage, its failure."""
    flaky: dict[str, str] = field(default_factory=dict)
    """Tests that passed when they ran again, with their first failure."""


def judge(run: Run) -> Verdict:
    """Let failed tests run again if nothing else has failed, and return the verdict."""
    verdict = Verdict()
    failed = [ended for ended in run.ended if not ended.passed and ended.stage.decides]
    files = {test.partition("::")[0] for ended in failed for test in ended.failures}
    again = len(files) <= FILES_AGAIN and all(ended.failed_by_tests_only for ended in failed)
    for ended in failed:
        passed: set[str] = set()
        if again:
            stage = ended.stage
            repeated = stage._replace(name=f"{stage.name}, again", files=(*ended.failures,))
            (second,) = run.run({"again": (repeated,)})
            passed = {test for test, outcome in second.outcomes.items() if outcome == "passed"}
            if not second.passed and not second.failed_by_tests_only:
                verdict.failed[repeated.name] = second.why
        for test, text in ended.failures.items():
            (verdict.flaky if test in passed else verdict.failed)[test] = text
        if not ended.failed_by_tests_only:
            verdict.failed[ended.stage.name] = ended.why
    return verdict


def report(run: Run, verdict: Verdict, seconds: float, slowest: int = 5) -> None:
    """Print failures, flaky tests, the slowest tests, and the time of each stage and lane."""
    for test, text in verdict.failed.items():
        run.say(f"\n{text}\nFAILED {test}")
    for test, text in verdict.flaky.items():
        run.say(f"\nFLAKY {test}: passed when it ran again, alone. This is a bug of the test or of the code.")
        run.say(f"Its first failure:\n{text}")
    run.say("")
    for ended in run.ended:
        verdict_of = "passed" if ended.passed else "FAILED"
        run.say(f"== {ended.stage.name}: {verdict_of}, {ended.seconds:.0f} s")
        longest = sorted(ended.durations.items(), key=lambda item: -item[1])[:slowest]
        for test, took in longest:
            if took >= 1.0:
                run.say(f"     {took:5.0f} s  {test}")
    run.say("lanes: " + ", ".join(f"{name} {took:.0f} s" for name, took in run.seconds.items()))
    run.say(f"flaky: {len(verdict.flaky)}")
    outcomes: dict[str, str] = {}
    for ended in run.ended:
        outcomes |= ended.outcomes
    counts = {
        outcome: sum(one == outcome for one in outcomes.values())
        for outcome in ("passed", "failed", "skipped")
    }
    run.say(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    run.say(f"{'FAILED' if verdict.failed else 'all passed'}, {seconds:.0f} s")


@contextmanager
def _killed_by_signals() -> Iterator[None]:
    """Raise Killed in the main thread at the first signal, and ignore further ones."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

    def kill(number: int, frame: FrameType | None) -> None:
        for one in numbers:
            signal.signal(one, signal.SIG_IGN)
        raise Killed(number)

    for number in numbers:
        signal.signal(number, kill)
    yield
    # After a signal they remain ignored: an impatient Ctrl-C must not cut the end short.
    for number in numbers:
        signal.signal(number, signal.SIG_DFL)


def run_groups(groups: Sequence[Lanes], show: Callable[[str], object]) -> int:
    """Run groups of lanes one after the other; return the exit status of the whole."""
    # Stacks are enough, and memory images of an engine are large.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    adopt_orphans()
    run, started = Run(show), time.monotonic()
    try:
        with _killed_by_signals():
            for lanes in groups:
                run.run(lanes)
            verdict = judge(run)
    except Killed as killed:
        run.say(f"\nended by {killed} after {time.monotonic() - started:.0f} s")
        run.end()
        return 128 + killed.number
    finally:
        run.close()
    report(run, verdict, time.monotonic() - started)
    return 1 if verdict.failed else 0


def main(tiers: Sequence[str]) -> int:
    """Run the tiers, or the default ones; return the exit status."""
    if unknown := [tier for tier in tiers if tier not in TIERS and tier != "quick"]:
        known = ", ".join(["quick", *TIERS])
        sys.stderr.write(f"tests.lanes: a tier must be one of {known}, got {' '.join(unknown)}\n")
        return 2
    os.chdir(REPOSITORY)
    groups = [group for tier in tiers for group in ORDER.get(tier) or [{tier: TIERS[tier]}]] or ORDER[""]

    def show(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    return run_groups(groups, show)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
