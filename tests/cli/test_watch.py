# SPDX-License-Identifier: Apache-2.0
"""`async-pipeline watch`: what the user sees, what is logged, and that no process is left behind.

The watcher ends every descendant of its process, so here it always runs in a separate process.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipe.async_pipeline.cli import watch
from recipe.async_pipeline.cli.watch import Screen, UnblockedOutput
from recipe.async_pipeline.observe.run_directory.summary import write_atomically
from recipe.async_pipeline.observe.table import MARK, TRANSIENT
from recipe.async_pipeline.processes import descendants
from tests import HANG_S, REPOSITORY
from tests.fakes.waiting import until

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


class Broken(io.StringIO):
    """A terminal whose other end is gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    def isatty(self) -> bool:
        return True


def test_a_broken_screen_costs_the_shown_lines_only(tmp_path: Path) -> None:
    screen = Screen(Broken(), time.monotonic())
    lines = [f"{MARK} run directory {tmp_path}", f"{TRANSIENT} step 1/9", f"{MARK} step 1", "noise"]
    for line in lines:
        screen.line(f"{line}\n")
    screen.fail(3)
    screen.close()
    log = (tmp_path / "run.log").read_text(encoding="utf-8").splitlines()
    assert [line for line in log if not line.startswith("watch: ")] == [lines[0], *lines[2:]]
    (lost,) = (line for line in log if line.startswith("watch: "))
    assert "Broken pipe" in lost


def test_a_terminal_that_lacks_a_character_shows_the_rest() -> None:
    reader, writer = os.pipe()
    with open(reader, "rb") as shown, open(writer, "w", encoding="ascii") as terminal:
        out = UnblockedOutput(terminal)
        Screen(out, time.monotonic()).line(f"{MARK} Zürich → 3\n")
        out.close()
        assert shown.readline().endswith(b"Z?rich ? 3\n")


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


@pytest.mark.parametrize("full", ["", "hydra.errors.ConfigCompositionException: "])
def test_a_complaint_of_hydra_is_the_cause_also_in_a_traceback(out: io.StringIO, full: str) -> None:
    screen = screen_of(out)
    screen.line(f"{full}Could not override 'trainer.nodes'.\n")
    screen.fail(1)
    assert screen.users_mistake
    assert "trainer.nodes is not a key of this config" in shown(out)[-1]


@pytest.mark.parametrize("told", [False, True])
def test_a_run_whose_processes_were_killed_has_a_summary(
    out: io.StringIO, tmp_path: Path, told: bool
) -> None:
    summary = tmp_path / "summary.json"
    summary.write_text('{"status": "completed"}')  # of an earlier process of the run
    screen = screen_of(out)
    screen.line(f"{MARK} run directory {tmp_path}\n")
    if told:
        write_atomically(summary, {"status": "failed", "error": "its own"})
    screen.fail(137)
    screen.close()
    found = json.loads(summary.read_text())
    assert found["status"] == "failed"
    if told:
        assert found["error"] == "its own"
    else:
        assert found["error"].startswith("killed by SIGKILL; `dmesg` tells")
        assert json.loads((tmp_path / "summary.1.json").read_text()) == {"status": "completed"}


def test_the_summary_of_a_refused_run_has_the_refusal(out: io.StringIO, tmp_path: Path) -> None:
    screen = screen_of(out)
    screen.line(f"{MARK} run directory {tmp_path}\n")
    screen.line(f"{MARK} staleness.straggler must be as before, got 'mask'\n")
    screen.fail(2)
    screen.close()
    found = json.loads((tmp_path / "summary.json").read_text())
    assert found == {"status": "failed", "error": "staleness.straggler must be as before, got 'mask'"}


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
    assert shown(out)[0] == "... running: 1 line so far"
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
        output, _ = process.communicate(timeout=HANG_S)
        return process.returncode, output.decode()


def test_a_successful_run() -> None:
    status, output = watched("echo", f"{MARK} done")
    assert status == 0
    assert re.fullmatch(r" *\d+\.\d s  done\n", output)


@pytest.mark.parametrize(
    ("command", "status", "told"),
    [
        (["sh", "-c", "echo the reason; exit 7"], 7, "    the reason\n.*failed with status 7"),
        (["sh", "-c", "kill -KILL $$"], 128 + signal.SIGKILL, "failed with status 137: killed by SIGKILL; "),
        ([], 2, "no command; write it after --"),
        (["no-such-program", "x"], 2, "^.*no-such-program is not an executable program.*\n$"),
    ],
)
def test_the_status_of_a_failing_command_is_passed_on(command: list[str], status: int, told: str) -> None:
    found, output = watched(*command)
    assert found == status and re.search(told, output)


def test_a_silent_command_is_reported_as_running() -> None:
    impatient = (
        "import sys; from recipe.async_pipeline.cli import watch; watch.QUIET_S = 0.001; "
        "sys.exit(watch.Watcher(sys.argv[1:]).run())"
    )
    # An interpreter takes longer than that to start.
    with started("-c", impatient, sys.executable, "-c", "import sys; sys.exit(4)") as process:
        output, _ = process.communicate(timeout=HANG_S)
        assert process.returncode == 4
    assert "... running: 0 lines so far" in output.decode()


def test_the_command_knows_its_start_time() -> None:
    code = f"import os, time; print({MARK!r}, time.time() - float(os.environ['ASYNC_PIPELINE_STARTED_UNIX']))"
    status, output = watched(sys.executable, "-c", code)
    assert status == 0
    assert 0 <= float(output.split()[-1]) < HANG_S


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
        output, _ = process.communicate(timeout=HANG_S)
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


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_closed_terminal_ends_the_run_as_sigterm_does(number: signal.Signals) -> None:
    """A shell and the kernel both send SIGHUP; twice is no request to kill."""
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        f"try:\n    print({MARK!r}, 'ready', flush=True)\n    time.sleep(1000)\n"
        f"except {'SystemExit' if number == signal.SIGTERM else 'KeyboardInterrupt'}:\n"
        f"    time.sleep(0.5)\n    print({MARK!r}, 'tidied up', flush=True)\n"
    )
    # Under nohup, the tests themselves ignore it.
    takes = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL); " + HURRIED.format(stop_s=1000)
    with started("-c", takes, sys.executable, "-c", code) as process:
        assert process.stdout is not None
        assert b"ready" in process.stdout.readline()
        had = descendants(process.pid)
        process.send_signal(number)
        # On a busy machine, lines that the command still runs may come first.
        assert any(b"interrupted" in line for line in iter(process.stdout.readline, b""))
        if number == signal.SIGHUP:
            process.send_signal(number)
        output, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == 130
    assert b"tidied up" in output
    assert had and all(is_gone(pid) for pid in had)


def test_nohup_keeps_the_run() -> None:
    ignores = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); " + HURRIED.format(stop_s=1000)
    code = f"import os, signal; os.kill(os.getppid(), signal.SIGHUP); print({MARK!r}, 'done')"
    with started("-c", ignores, sys.executable, "-c", code) as process:
        output, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == 0
    assert b"done" in output


@pytest.mark.slow
def test_the_command_runs_to_its_end_although_its_screen_is_not_read(tmp_path: Path) -> None:
    lines = 20_000  # more than any pipe holds
    code = (
        f"print({MARK!r}, 'run directory {tmp_path}', flush=True)\n"
        f"for number in range({lines}): print({MARK!r}, 'step', number)"
    )
    with started("-m", "recipe.async_pipeline", "watch", "--", sys.executable, "-c", code) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        process.wait(HANG_S)
    assert (tmp_path / "run.log").read_text().count("step") == lines


@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", ">&-"])
def test_a_command_runs_without_any_screen(tmp_path: Path, closed: str) -> None:
    code = f"print({MARK!r}, 'run directory {tmp_path}', flush=True); print('step 1')"
    watch_it = [sys.executable, "-m", "recipe.async_pipeline", "watch", "--", sys.executable, "-c", code]
    shell = ["sh", "-c", f"{shlex.join(watch_it)} {closed}"]
    assert subprocess.run(shell, cwd=REPOSITORY, timeout=HANG_S, stderr=subprocess.DEVNULL).returncode == 0
    assert "step 1" in (tmp_path / "run.log").read_text()


@pytest.mark.slow
def test_a_screen_that_is_stopped_holds_up_nothing(tmp_path: Path) -> None:
    lines = 20_000  # more than any pipe holds
    code = (
        f"print({MARK!r}, 'run directory {tmp_path}', flush=True)\n"
        f"for number in range({lines}): print({MARK!r}, 'step', number)"
    )
    with started("-m", "recipe.async_pipeline", "watch", "--", sys.executable, "-c", code) as process:
        assert process.wait(HANG_S) == 0, "its output is not read"
    log = (tmp_path / "run.log").read_text()
    assert log.count("step") == lines
    assert "watch: a line cannot be shown (10000 lines wait for the terminal)" in log


@pytest.mark.slow
def test_the_command_ends_if_its_watch_is_killed() -> None:
    """Also below a shell, as most launch scripts are."""
    code = (
        "from recipe.async_pipeline.verl_bridge.process import interrupts; interrupts.end_with_watch()\n"
        f"import os, time; print({MARK!r}, os.getpid(), flush=True); time.sleep(1000)"
    )
    shell = f"{sys.executable} -c {shlex.quote(code)}; exit 0"
    with started("-m", "recipe.async_pipeline", "watch", "--", "sh", "-c", shell) as process:
        assert process.stdout is not None
        command = int(process.stdout.readline().split()[-1])
        process.kill()
        until(lambda: is_gone(command), "the end of the command")
