# SPDX-License-Identifier: Apache-2.0
"""Commands of agents: their environment, their output, and that nothing of them is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from recipe.async_pipeline.agents.processes import command_process
from recipe.async_pipeline.agents.processes.commands import (
    KEPT_BYTES,
    Finished,
    LeftBehind,
    OutputLog,
    environment,
    run_command,
)
from tests import HANG_S
from tests.fakes.descriptors import Descriptors
from tests.fakes.waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="process groups of Linux")


def python(code: str) -> list[str]:
    return [sys.executable, "-I", "-c", code]


def run(code: str, cwd: Path, left: LeftBehind | None = None, **env: str) -> Finished:
    """Run Python code as a command."""
    return asyncio.run(asyncio.wait_for(run_command(python(code), cwd, env, None, left), HANG_S))


async def cancelled(code: str, cwd: Path, left: LeftBehind) -> int:
    """Run Python code that starts a `child`, cancel it once it runs, and return the child's number."""
    file = cwd / "pid"
    code += f"open({str(file)!r}, 'w').write(str(child.pid)); child.wait()"
    task = asyncio.create_task(run_command(python(code), cwd, {}, None, left))
    while not file.exists() or not file.read_text():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return int(file.read_text())


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_command_has_its_folder_and_only_its_environment(tmp_path: Path) -> None:
    code = "import os, sys; print(os.getcwd(), sorted(os.environ)); print('e', file=sys.stderr); sys.exit(3)"
    finished = run(code, tmp_path, NAME="value")
    assert finished.stdout.startswith(f"{tmp_path} ") and "'NAME'" in finished.stdout
    assert "HOME" not in finished.stdout
    assert (finished.status, finished.stderr) == (3, "e\n")
    assert finished.describe() == "exit status 3: e"


def test_what_is_passed_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    # OpenCV changes it when a worker imports it.
    monkeypatch.setenv("LD_LIBRARY_PATH", "/venv/cv2/lib")
    found = environment({"NAME": "value"})
    assert "LD_LIBRARY_PATH" not in found
    assert found["PATH"] == os.environ["PATH"] and found["NAME"] == "value"
    assert "HF_TOKEN" not in found and "PYTHONPATH" not in found


def test_the_end_of_the_output_is_kept(tmp_path: Path) -> None:
    finished = run(f"print('x' * {5 * KEPT_BYTES}); print('{{\"reward\": 2}}')", tmp_path)
    assert len(finished.stdout) <= KEPT_BYTES and finished.last_object() == {"reward": 2}


def test_a_log_gets_the_output_as_it_arrives(tmp_path: Path) -> None:
    log = OutputLog()
    code = "import os; print('out', flush=True); os.write(2, b'err\\n')"
    asyncio.run(run_command(python(code), tmp_path, {}, log))
    assert sorted(log.text().splitlines()) == ["err", "out"]


async def test_the_output_of_a_command_that_is_cancelled_is_in_its_log(tmp_path: Path) -> None:
    log = OutputLog()

    code = "import time; print('begun', flush=True); time.sleep(600)"
    running = asyncio.create_task(run_command(python(code), tmp_path, {}, log))
    while not log.text():  # noqa: ASYNC110 - a pipe has no event for it
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert log.text() == "begun\n"


@pytest.mark.parametrize("text", ["", "\n", "text", "[1]", '{"a": 1}\nmore'])
def test_a_last_line_that_is_no_object(text: str) -> None:
    assert Finished(0, text, "").last_object() is None


def test_a_command_that_cannot_be_started(tmp_path: Path) -> None:
    finished = asyncio.run(run_command([str(tmp_path / "none")], tmp_path, {}))
    assert finished.status == 127 and "No such file" in finished.describe()


def test_a_command_that_is_killed(tmp_path: Path) -> None:
    finished = run("import os; os.kill(os.getpid(), 9)", tmp_path)
    assert finished.describe() == "killed by SIGKILL"


LEAVES_A_CHILD = (
    "import subprocess, sys; "
    "child = subprocess.Popen([sys.executable, '-I', '-c', 'import time; time.sleep(600)']); "
    "print(child.pid, flush=True); "
)


def test_children_end_with_their_command(tmp_path: Path) -> None:
    finished = run(LEAVES_A_CHILD, tmp_path)
    assert finished.status == 0
    until(lambda: gone(int(finished.stdout)), "the child is killed")


LEAVES_ITS_GROUP = (
    "import subprocess, sys; "
    "child = subprocess.Popen([sys.executable, '-I', '-c', 'import time; time.sleep(600)'], "
    "start_new_session=True, stdin=-3, stdout=-3, stderr=-3); "
    "print(child.pid, flush=True); "
)


def test_processes_that_left_their_group_are_ended(tmp_path: Path) -> None:
    left = LeftBehind()
    more = "subprocess.Popen(['true'], start_new_session=True); subprocess.Popen(['sleep', '600']); "
    finished = run(LEAVES_ITS_GROUP + more + "sys.exit(3)", tmp_path, left, **environment({}))
    assert finished.status == 3 and gone(int(finished.stdout)) and left.newly() == 0


def test_orphans_of_processes_that_left_their_group_are_ended(tmp_path: Path) -> None:
    """As a daemon has them: each kill leaves its children to the guard."""
    inner = "import subprocess, time; subprocess.Popen(['setsid', 'sleep', '600']); time.sleep(600)"
    code = (
        "import pathlib, subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-I', '-c', {inner!r}], start_new_session=True, "
        "stdin=-3, stdout=-3, stderr=-3)\n"
        "own = pathlib.Path('/proc', str(child.pid), 'task', str(child.pid), 'children')\n"
        "while not own.read_text().split(): time.sleep(0.01)\n"
        "print(child.pid, own.read_text())\n"
    )
    left = LeftBehind()
    finished = run(code, tmp_path, left, **environment({}))
    found = [int(pid) for pid in finished.stdout.split()]
    assert len(found) == 2 and all(map(gone, found)) and left.newly() == 0, finished.describe()


async def test_processes_that_left_the_group_of_a_cancelled_command_are_ended(tmp_path: Path) -> None:
    left = LeftBehind()
    assert gone(await cancelled(LEAVES_ITS_GROUP, tmp_path, left)) and left.newly() == 0


def test_children_that_resist_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_process, "CHILDREN_END_S", 0.0)
    monkeypatch.setattr(command_process, "children", lambda: [11, 12])
    monkeypatch.setattr(command_process, "reap_orphans", lambda command: None)
    monkeypatch.setattr(os, "kill", lambda *args: None)
    assert command_process.end_children() == 2


def test_orphans_that_end_are_reaped_while_the_command_runs(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, subprocess, sys, time\n"
        "made = subprocess.run(['sh', '-c', 'true & echo $!'], capture_output=True, check=True).stdout\n"
        "while pathlib.Path('/proc', made.decode().strip()).exists(): time.sleep(0.01)\n"
    )
    left = LeftBehind()
    finished = run(code, tmp_path, left, **environment({}))
    assert (finished.status, left.newly()) == (0, 0), finished.describe()


@pytest.mark.slow
def test_a_killed_guard_does_not_block_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process that was forked meanwhile may still have the end that the guard reports to."""
    pipe, held = os.pipe, list[int]()

    def held_open() -> tuple[int, int]:
        ends = pipe()
        held.append(os.dup(ends[1]))
        if len(held) == 2:
            monkeypatch.setattr(os, "pipe", pipe)
        return ends

    monkeypatch.setattr(os, "pipe", held_open)
    left, found = LeftBehind(), list[Finished]()
    command = ["sh", "-c", "kill -9 $PPID; sleep 600"]
    running = run_command(command, tmp_path, environment({}), None, left)
    thread = threading.Thread(target=lambda: found.append(asyncio.run(running)), daemon=True)
    thread.start()
    thread.join(HANG_S)
    for end in held:
        os.close(end)
    assert [one.status for one in found] == [-signal.SIGKILL] and left.newly() == 0


async def test_a_cancelled_command_is_killed_with_its_children(tmp_path: Path) -> None:
    child = await cancelled(LEAVES_A_CHILD, tmp_path, LeftBehind())
    until(lambda: gone(child), "the child is killed")


@pytest.mark.slow
async def test_a_command_that_is_cancelled_before_it_starts_leaves_no_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recall may come while all threads of the executor are busy."""

    loop, release = asyncio.get_running_loop(), threading.Event()
    loop.set_default_executor(ThreadPoolExecutor(1))
    descriptors = Descriptors(monkeypatch)
    busy = loop.run_in_executor(None, release.wait)
    task = asyncio.create_task(run_command(["true"], tmp_path, {}))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    release.set()
    await busy
    # The one thread begins it, undoes it, and only then runs what comes next.
    await loop.run_in_executor(None, lambda: None)
    assert descriptors.made and descriptors.still_open() == set()


def test_a_command_does_not_outlive_its_worker(tmp_path: Path) -> None:
    """A worker that is killed cannot clean up."""
    code = "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(600)"
    worker = (
        "import asyncio, sys, pathlib\n"
        "from recipe.async_pipeline.agents.processes.commands import run_command\n"
        f"command = [sys.executable, '-I', '-c', {code!r}]\n"
        f"asyncio.run(run_command(command, pathlib.Path({str(tmp_path)!r}), {{}}))\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen([sys.executable, "-c", worker], env=env)
    pid = tmp_path / "pid"
    until(lambda: pid.exists() and bool(pid.read_text()), "the command runs")
    process.send_signal(signal.SIGKILL)
    process.wait()
    until(lambda: gone(int(pid.read_text())), "the command is killed")
