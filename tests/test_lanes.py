# SPDX-License-Identifier: Apache-2.0
"""Lanes run side by side, failed tests run once again, and an end says what hung and leaves nothing."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from recipe.async_pipeline.lab.job import processes_with
from tests import HANG_S, OUTPUT, REPOSITORY
from tests.fakes.waiting import until
from tests.lanes import DEFAULT, FILES_AGAIN, ORDER, SHOWN, TIERS, Stage

MARK = "ASYNC_PIPELINE_TEST_LANES"
SCRIPT = """
import sys
from tests.lanes import Stage, pytest_stage, run_groups
lanes = {lanes}
sys.exit(run_groups([lanes], lambda line: print(line, flush=True)))
"""
FAILS_ONCE = """
from pathlib import Path
import pytest
@pytest.fixture(scope="module")
def number():
    runs = Path("runs")
    runs.write_text(runs.read_text() + "x" if runs.exists() else "x")
    return len(runs.read_text())
def test_flaky(number): assert number > 1, "the first time"
def test_sound(number): pass
"""
HANGS = f"""
import os, subprocess, sys, threading
def test_before(): pass
def test_hangs():
    with open(os.environ["{OUTPUT}"], "w") as output: output.write("one line of a job")
    subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    threading.Event().wait()
"""
pytestmark = pytest.mark.slow


class Done(NamedTuple):
    status: int
    output: str


Start = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts lanes, given as an expression, in a folder of test files."""
    processes = []

    def start_lanes(lanes: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), MARK: str(tmp_path)}
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT.format(lanes=lanes)],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        processes.append(process)
        return process

    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    yield start_lanes
    for process in processes:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def finish(process: subprocess.Popen[str]) -> Done:
    output, _ = process.communicate()
    return Done(process.returncode, output)


def test_lanes_run_side_by_side_and_show_their_lines_with_their_names(start: Start, tmp_path: Path) -> None:
    """Each waits for a file that the other one writes."""
    wait = "until [ -e {0} ]; do :; done; echo saw {0}"
    one, two = f"touch a; {wait.format('b')}", f"touch b; {wait.format('a')}"
    done = finish(
        start(
            f"{{'one': [Stage('first', ('sh', '-c', {one!r}))],"
            f" 'two': [Stage('other', ('sh', '-c', {two!r}))]}}"
        )
    )
    assert done.status == 0, done.output
    assert "one | saw b\n" in done.output and "two | saw a\n" in done.output
    assert re.search(r"^== first: passed, \d+ s$", done.output, re.MULTILINE)


def test_a_test_that_fails_once_is_flaky_and_does_not_fail_the_run(start: Start, tmp_path: Path) -> None:
    """The fixture of its module is made again; the other files of the stage do not run again."""
    (tmp_path / "test_it.py").write_text(FAILS_ONCE)
    (tmp_path / "test_other.py").write_text("def test_other(): pass\n")
    done = finish(start("{'unit': [pytest_stage('unit', files=['test_it.py', 'test_other.py'])]}"))
    assert done.status == 0, done.output
    assert re.search(r"^\d\d:\d\d:\d\d test_it\.py::test_flaky$", done.output, re.MULTILINE)
    assert "FLAKY test_it.py::test_flaky" in done.output and "the first time" in done.output
    assert len(re.findall(r"^\d\d:\d\d:\d\d test_other\.py::test_other$", done.output, re.MULTILINE)) == 1
    assert re.search(r"^3 passed, 0 failed, 0 skipped$", done.output, re.MULTILINE)


def test_a_test_that_fails_twice_fails_the_run_and_its_failure_is_printed_last(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "test_it.py").write_text(
        "def helper(): assert 1 + 1 == 3\ndef test_it(): helper()\ndef test_other(): pass\n"
    )
    done = finish(start("{'unit': [pytest_stage('unit')]}"))
    assert done.status == 1
    # The file and line of each frame: a failure that does not come again can be found by them alone.
    frames = re.findall(r"test_it\.py:(\d): in (\w+)$", done.output, re.MULTILINE)
    assert frames == [("2", "test_it"), ("1", "helper")] * 3
    assert re.search(r"^FAILED test_it\.py::test_it$", done.output, re.MULTILINE)
    assert done.output.count("assert (1 + 1) == 3") == 3, (
        "when it failed, when it failed again, and at the end"
    )
    assert re.search(r"^1 passed, 1 failed, 0 skipped$", done.output, re.MULTILINE)


def test_a_session_that_is_killed_is_named_with_its_test(start: Start, tmp_path: Path) -> None:
    """By the kernel, if memory runs out."""
    (tmp_path / "test_it.py").write_text(
        "import os, signal\ndef test_before(): pass\ndef test_dies(): os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = finish(start("{'unit': [pytest_stage('unit')]}"))
    assert done.status == 1
    early = "exit status -9 before the end of its session, in test_it.py::test_dies"
    assert f"{early}\nFAILED unit\n" in done.output


def test_a_session_whose_process_exits_with_0_has_failed(start: Start, tmp_path: Path) -> None:
    """As a child of a fork does that forgets which one it is."""
    (tmp_path / "test_it.py").write_text(
        "import os\ndef test_bad(): assert False\ndef test_exits(): os._exit(0)\ndef test_never(): pass\n"
    )
    done = finish(start("{'unit': [pytest_stage('unit')]}"))
    assert done.status == 1
    early = "exit status 0 before the end of its session, in test_it.py::test_exits"
    assert f"{early}\nFAILED unit\n" in done.output


def test_a_process_that_dies_after_its_tests_ran_again_fails_the_run(start: Start, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        FAILS_ONCE.replace(
            'def test_flaky(number): assert number > 1, "the first time"',
            "def test_flaky(number):\n    import atexit, os\n"
            '    assert number > 1, "the first time"\n    atexit.register(os.abort)',
        )
    )
    done = finish(start("{'unit': [pytest_stage('unit')]}"))
    assert done.status == 1
    assert "exit status -6\nFAILED unit, again\n" in done.output


@pytest.mark.parametrize("other", ["many files", "an error of a collection", "a command"])
def test_nothing_runs_again_if_more_has_failed(start: Start, tmp_path: Path, other: str) -> None:
    (tmp_path / "test_it.py").write_text(FAILS_ONCE)
    stages = "pytest_stage('unit')"
    if other == "many files":
        for number in range(FILES_AGAIN):
            (tmp_path / f"test_{number}.py").write_text(FAILS_ONCE.replace("runs", f"runs{number}", 1))
    elif other == "a command":
        stages += ", Stage('checks', ('false',))"
    else:
        (tmp_path / "test_broken.py").write_text("import nothing_of_this_name\n")
        stages = "pytest_stage('unit', '--continue-on-collection-errors')"
    done = finish(start(f"{{'unit': [{stages}]}}"))
    assert done.status == 1
    assert "FLAKY" not in done.output and "FAILED test_it.py::test_flaky" in done.output


def test_a_stage_that_does_not_decide_is_shown(start: Start) -> None:
    done = finish(start("{'style': [Stage('style', ('sh', '-c', 'echo ugly; exit 1'), decides=False)]}"))
    assert done.status == 0
    assert "ugly\n== style: FAILED (does not decide), 0 s\n" in done.output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_an_end_names_the_test_that_hangs_with_its_stack_and_leaves_nothing(
    start: Start, tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "test_it.py").write_text(HANGS)
    after = "Stage('never', ('true',))"
    process = start(
        f"{{'unit': [pytest_stage('unit'), {after}], 'other': [Stage('sleep', ('sleep', '1000'))]}}"
    )
    assert process.stdout is not None
    lines = iter(process.stdout.readline, "")
    assert any(line.endswith("test_it.py::test_hangs\n") for line in lines)
    # The test, its process in another session, the sleep, the run and its guard.
    while len(processes_with(MARK, str(tmp_path))) < 5:
        assert process.poll() is None
    process.send_signal(number)
    # A second signal does not cut the end short.
    said = [next(line for line in lines if "ended by" in line)]
    process.send_signal(number)
    done = finish(process)
    done = done._replace(output="".join(said) + done.output)
    assert done.status == 128 + number
    assert "in test_hangs" in done.output, "its stack"
    assert "one line of a job" in done.output
    assert re.search(r"unit was in test_it\.py::test_hangs, \d+ s since the start of unit", done.output)
    assert re.search(r"other was in sleep, ", done.output)
    assert processes_with(MARK, str(tmp_path)) == []


def test_a_run_that_is_ended_at_a_random_moment_leaves_nothing(start: Start, tmp_path: Path) -> None:
    """After a random line of its output, also between two stages."""
    (tmp_path / "test_it.py").write_text(
        "import pytest\n@pytest.mark.parametrize('n', range(50))\ndef test(n): pass\n"
    )
    chance = random.Random(1)
    for _ in range(3):
        process = start("{name: [pytest_stage('unit'), Stage('last', ('sleep', '1000'))] for name in 'ab'}")
        assert process.stdout is not None
        for _ in range(chance.randrange(1, 100)):
            process.stdout.readline()
        process.terminate()
        assert finish(process).status == 128 + signal.SIGTERM
        assert processes_with(MARK, str(tmp_path)) == []


def test_a_run_that_is_killed_leaves_nothing(start: Start, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        HANGS.replace("def test_hangs():", "def test_hangs(tmp_path):").replace(
            "    threading", "    import tempfile; print('at', tempfile.mkdtemp(), tmp_path)\n    threading"
        )
    )
    process = start("{'unit': [pytest_stage('unit', '-s')]}")
    assert process.stdout is not None
    place = next(line for line in iter(process.stdout.readline, "") if line.startswith("at "))
    folder, kept = (Path(path) for path in place.split()[1:])
    assert folder.is_dir()
    process.kill()
    until(lambda: processes_with(MARK, str(tmp_path)) == [], "all processes end")
    assert not folder.exists() and kept.is_dir()


def test_an_orphan_is_reaped(start: Start, tmp_path: Path) -> None:
    """As by init: else a test would wait for ever for the end of a process that it did not start itself."""
    orphan = 'pid=$(sh -c "sleep 0.01 >/dev/null & echo \\$!"); while [ -e /proc/$pid ]; do sleep 0.01; done'
    done = finish(start(f"{{'unit': [Stage('orphan', ('sh', '-c', {orphan!r}))]}}"))
    assert done.status == 0, done.output


def test_what_a_test_leaves_behind_is_ended_and_named(start: Start, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import subprocess\n"
        "def test_it(): subprocess.Popen(['sleep', '1000'], start_new_session=True, stdout=-3)\n"
    )
    done = finish(start("{'unit': [pytest_stage('unit', '-p', 'no:unraisableexception')]}"))
    assert done.status == 0
    assert re.search(r"^left behind by a test, now ended: \d+ sleep 1000$", done.output, re.MULTILINE)
    assert processes_with(MARK, str(tmp_path)) == []


def selections(stages: Iterable[Stage]) -> list[str]:
    """Return the expressions by which the sessions of pytest select tests."""
    return [
        stage.command[stage.command.index("-m", stage.command.index("pytest")) + 1]
        for stage in stages
        if stage.of_tests
    ]


def test_default_lanes_exclude_nightly_and_run_each_other_test_once() -> None:
    stages = [stage for lanes in (SHOWN, DEFAULT) for lane in lanes.values() for stage in lane]
    names = ("e2e", "probe", "real_engine", "nightly", "style", "slow")
    for bits in range(2 ** len(names)):
        marked = {name: bool(bits >> number & 1) for number, name in enumerate(names)}
        if (marked["probe"] and not marked["e2e"]) or sum(marked[n] for n in names[:1] + names[2:5]) > 1:
            continue
        selected = [one for one in selections(stages) if eval(one, {}, marked)]
        assert len(selected) == (0 if marked["nightly"] else 1), (marked, selected)


def test_only_the_nightly_tiers_select_nightly_tests() -> None:
    others = [stage for name, stages in TIERS.items() if not name.startswith("nightly") for stage in stages]
    quick = [stage for lanes in ORDER["quick"] for lane in lanes.values() for stage in lane]
    assert all("not nightly" in one or one == "style" for one in selections([*others, *quick]))


def test_a_mark_by_which_its_lane_does_not_find_the_file_stops_the_session(tmp_path: Path) -> None:
    file = tmp_path / "test_hidden.py"
    file.write_text(
        "import pytest\nname = 'probe'\n@getattr(pytest.mark, name)\ndef test_it(): pass\n", encoding="utf-8"
    )
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "--rootdir", str(tmp_path), str(file)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"[('{file}', 'probe')]" in done.stderr
