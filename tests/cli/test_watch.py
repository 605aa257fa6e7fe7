# SPDX-License-Identifier: Apache-2.0
"""`async-pipeline watch`: what the user sees, what is logged, and that no process is left behind.

The watcher ends every descendant of its process, so here it always runs in a separate process.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipe.async_pipeline.cli import watch
from recipe.async_pipeline.cli.watch import Screen
from recipe.async_pipeline.observe.table import MARK, TRANSIENT
from recipe.async_pipeline.processes import descendants
from tests import REPOSITORY
from tests.fakes.waiting import DEADLINE_S

SLEEPER = (
    "import subprocess, sys; p = subprocess.Popen(['sleep', '1000'], start_new_session={detached}); "
    "print(p.pid)"
)
"""Starts a sleeping child, prints its PID and ends."""
IGNORES_CTRL_C = (
    "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print({mark!r}, 'ready', "
    "flush=True); "
    "time.sleep(1000)"
)
HURRIED = (
    "import sys; from recipe.async_pipeline.cli import watch; watch.STOP_S, watch.TERM_S = {stop_s}, 0.5; "
    "sys.exit(watch.Watcher(sys.argv[1:]).run())"
)
"""A watcher with short deadlines."""


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


# What the user sees.


@pytest.fixture
def out() -> io.StringIO:
    return io.StringIO()


def shown(out: io.StringIO) -> list[str]:
    """Return the shown lines without their times."""
    return [re.sub(r"^ *\d+\.\d s  ", "", line) for line in out.getvalue().splitlines()]


def screen_of(out: io.StringIO, *, verbose: bool = False) -> Screen:
    return Screen(out, time.monotonic(), verbose=verbose)


def test_only_marked_lines_are_shown(out: io.StringIO) -> None:
    screen = screen_of(out)
    for line in ("noise\n", f"{MARK} step 1\n", f"\x1b[36m(Runner pid=7)\x1b[0m {MARK} step 2\n"):
        screen.line(line)
    assert shown(out) == ["step 1", "step 2"]
    assert re.match(r" +0\.\d s  step 1", out.getvalue())


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_replaces_itself_and_stays_below_shown_lines(tmp_path: Path) -> None:
    terminal = Terminal()
    screen = Screen(terminal, time.monotonic())
    screen.line(f"{MARK} run directory {tmp_path}\n")
    screen.line(f"(TaskRunner pid=1) {TRANSIENT} step 1/9\n")
    screen.line(f"(TaskRunner pid=1) {TRANSIENT} step 2/9\n")
    screen.line(f"{MARK} a row\n")
    screen.close()
    clear = "\r\x1b[2K"
    output_so_far = re.sub(r" +\d+\.\d s  ", "", terminal.getvalue())
    assert output_so_far == f"run directory {tmp_path}\nstep 1/9{clear}step 2/9{clear}a row\nstep 2/9{clear}"
    assert "step" not in (tmp_path / "run.log").read_text()


def test_progress_is_for_terminals_only(out: io.StringIO) -> None:
    Screen(out, time.monotonic()).line(f"{TRANSIENT} step 1/9\n")
    assert out.getvalue() == ""


def test_verbose_shows_every_line_without_colours(out: io.StringIO) -> None:
    screen = screen_of(out, verbose=True)
    screen.line("\x1b[31mnoise\x1b[0m\n")
    screen.line(f"{MARK} step\n")
    assert shown(out) == ["noise", "step"]


def test_rays_note_on_repeated_lines_is_not_shown(out: io.StringIO) -> None:
    screen_of(out).line(f"(pid=7) {MARK} ready [repeated 2x across cluster] (set RAY_DEDUP_LOGS=0)\n")
    assert shown(out) == ["ready"]


def test_the_log_holds_every_line_also_from_before_it_was_opened(out: io.StringIO, tmp_path: Path) -> None:
    screen = screen_of(out)
    lines = ["early", "\x1b[1mbold\x1b[0m", f"{MARK} run directory {tmp_path}", "later", f"{MARK} step 1"]
    for line in lines:
        screen.line(f"{line}\n")
    filed = ["early", "bold", *lines[2:]]
    assert (tmp_path / "run.log").read_text(encoding="utf-8").splitlines() == filed, "before it is closed"
    screen.close()
    assert screen.log_path == tmp_path / "run.log"


def test_the_log_of_an_earlier_process_is_kept(out: io.StringIO, tmp_path: Path) -> None:
    for _ in range(2):
        screen = screen_of(out)
        screen.line(f"{MARK} run directory {tmp_path}\n")
        screen.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.1.log", "run.log"]


def test_a_second_run_directory_changes_nothing(out: io.StringIO, tmp_path: Path) -> None:
    screen = screen_of(out)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        screen.line(f"{MARK} run directory {tmp_path / name}\n")
    screen.close()
    assert len((tmp_path / "a" / "run.log").read_text(encoding="utf-8").splitlines()) == 2
    assert not (tmp_path / "b" / "run.log").exists()


def test_an_unwritable_log_is_reported_and_does_not_stop_the_run(out: io.StringIO, tmp_path: Path) -> None:
    screen = screen_of(out)
    screen.line(f"{MARK} run directory {tmp_path / 'missing'}\n")
    screen.line(f"{MARK} step 1\n")
    screen.fail(3)
    screen.close()
    assert any("run.log cannot be written" in line for line in shown(out))
    assert "step 1" in shown(out)
    assert shown(out)[-1] == "failed with status 3"


def test_the_cause_is_on_the_last_line(out: io.StringIO, tmp_path: Path) -> None:
    screen = screen_of(out)
    for line in (f"{MARK} run directory {tmp_path}", "Traceback", f"{MARK} cause: ValueError: boom", "noise"):
        screen.line(f"{line}\n")
    screen.fail(1)
    screen.close()
    last = shown(out)[-1]
    assert last == f"failed with status 1: ValueError: boom; the whole log is {tmp_path / 'run.log'}"
    assert "    Traceback" not in out.getvalue(), "the cause replaces the tail"


def test_a_key_unknown_to_hydra_is_one_line_and_status_2() -> None:
    path = "trainer.v1.async_pipeline.max_lags"
    code = f"import sys; sys.exit(\"Could not override '{path}'.\\nTo append to your config use +{path}=2\")"
    watched = [sys.executable, "-m", "recipe.async_pipeline", "watch", "--", sys.executable, "-c", code]
    done = subprocess.run(watched, capture_output=True, text=True)
    assert done.returncode == 2
    (line,) = done.stdout.splitlines()
    assert f"failed with status 2: {path} is unknown; nearest knobs: staleness.max_lag, " in line


def test_a_long_silence_is_broken(out: io.StringIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = screen_of(out)
    screen.line("noise\n")
    screen.reassure()
    assert shown(out) == [], "not yet"
    monkeypatch.setattr(watch, "QUIET_S", 0.0)
    screen.reassure()
    screen.line(f"{MARK} run directory {tmp_path}\n")
    screen.reassure()
    screen.close()
    assert shown(out)[0] == "... running: 1 lines so far"
    assert shown(out)[-1] == "... running: 2 lines in run.log so far"


def test_without_a_cause_the_tail_is_shown(out: io.StringIO) -> None:
    screen = screen_of(out)
    for number in range(100):
        screen.line(f"line {number}\n")
    screen.fail(7)
    assert shown(out) == [
        *(f"    line {n}" for n in range(100 - watch.TAIL_LINES, 100)),
        "failed with status 7",
    ]


# Whole runs.


@contextlib.contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a watcher in a separate process, and kill it and its descendants at the end."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        bufsize=0,  # a line may be read first and the rest by communicate
        cwd=REPOSITORY,
        start_new_session=True,
    )
    with process:
        below: list[int] = []
        try:
            yield process
        finally:
            if process.poll() is None:
                below = descendants(process.pid)
            for pid in (process.pid, *below):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def watched(*command: str) -> tuple[int, str]:
    """Return the status and the output of `async-pipeline watch -- COMMAND`."""
    with started("-m", "recipe.async_pipeline", "watch", "--", *command) as process:
        output, _ = process.communicate(timeout=DEADLINE_S)
        return process.returncode, output.decode()


def test_a_successful_run() -> None:
    status, output = watched("echo", f"{MARK} done")
    assert status == 0
    assert re.fullmatch(r" *\d+\.\d s  done\n", output)


def test_the_status_of_a_failing_command_is_passed_on_with_its_tail() -> None:
    status, output = watched("sh", "-c", "echo the reason; exit 7")
    assert status == 7
    assert "    the reason\n" in output
    assert "failed with status 7" in output


def test_a_killed_command_has_the_status_that_a_shell_gives() -> None:
    status, output = watched("sh", "-c", "kill -KILL $$")
    assert status == 128 + signal.SIGKILL
    assert "failed with status 137" in output


def test_a_silent_command_is_reported_as_running() -> None:
    impatient = (
        "import sys; from recipe.async_pipeline.cli import watch; watch.QUIET_S = 0.001; "
        "sys.exit(watch.Watcher(sys.argv[1:]).run())"
    )
    # An interpreter takes longer than that to start.
    with started("-c", impatient, sys.executable, "-c", "import sys; sys.exit(4)") as process:
        output, _ = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 4
    assert "... running: 0 lines so far" in output.decode()


def test_no_command_is_a_user_error() -> None:
    status, output = watched()
    assert status == 2
    assert "no command; write it after --" in output


def test_a_command_that_is_no_program_is_a_user_error() -> None:
    status, output = watched("no-such-program", "x")
    assert (status, output.count("\n")) == (2, 1)
    assert "no-such-program is not an executable program" in output


def test_the_command_knows_its_start_time() -> None:
    code = f"import os, time; print({MARK!r}, time.time() - float(os.environ['ASYNC_PIPELINE_STARTED_UNIX']))"
    status, output = watched(sys.executable, "-c", code)
    assert status == 0
    assert 0 <= float(output.split()[-1]) < DEADLINE_S


@pytest.mark.slow
@pytest.mark.parametrize("detached", [False, True])
@pytest.mark.parametrize("status", [0, 3])
def test_an_orphan_of_the_command_is_ended(detached: bool, status: int) -> None:
    code = f"{SLEEPER.format(detached=detached)}; print({MARK!r}, p.pid, flush=True); sys.exit({status})"
    code_status, output = watched(sys.executable, "-c", code)
    assert code_status == status
    found = re.search(r" s  (\d+)\n", output)
    assert found is not None
    assert is_gone(int(found[1]))


def interrupt(stop_s: float, times: int, code: str) -> tuple[int, str, list[int]]:
    """Interrupt a watcher whose command runs `code`; return its status, its output and its processes."""
    with started("-c", HURRIED.format(stop_s=stop_s), sys.executable, "-c", code) as process:
        assert process.stdout is not None
        output_so_far = process.stdout.readline()
        assert b"ready" in output_so_far
        had = descendants(process.pid)
        for _ in range(times):
            process.send_signal(signal.SIGINT)
            output_so_far += process.stdout.readline()
        output, _ = process.communicate(timeout=DEADLINE_S)
        return process.returncode, (output_so_far + output).decode(), had


def test_ctrl_c_lets_the_command_end_by_itself() -> None:
    code = (
        "import time\n"
        f"try:\n    print({MARK!r}, 'ready', flush=True)\n    time.sleep(1000)\n"
        f"except KeyboardInterrupt:\n    print({MARK!r}, 'tidied up', flush=True)\n"
    )
    status, output, had = interrupt(1000, 1, code)
    assert status == 130
    assert "interrupted: ending the run" in output
    assert "tidied up" in output
    assert "all processes have ended" in output
    assert had and all(is_gone(pid) for pid in had)


def test_ctrl_c_ends_a_command_that_ignores_it() -> None:
    status, output, had = interrupt(0.3, 1, IGNORES_CTRL_C.format(mark=MARK))
    assert status == 130
    assert "all processes have ended" in output
    assert had and all(is_gone(pid) for pid in had)


def test_a_second_ctrl_c_kills_immediately() -> None:
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + IGNORES_CTRL_C.format(
        mark=MARK
    )
    status, _, had = interrupt(1000, 2, stubborn)
    assert status == 130
    assert had and all(is_gone(pid) for pid in had)


# Processes.
