# SPDX-License-Identifier: Apache-2.0
"""Agents that try to read or change what others own: they fail in the sandbox, and succeed without it."""

from __future__ import annotations

import asyncio
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from recipe.async_pipeline.agents.processes import sandbox
from recipe.async_pipeline.agents.processes.commands import Finished, environment, run_command
from recipe.async_pipeline.agents.processes.sandbox import PREFIX, Folder, Sandbox, reason_without
from recipe.async_pipeline.agents.runners import AgentSpec, Policy, Task, runner_of, verified
from tests import HANG_S
from tests.fakes.waiting import until

works = pytest.mark.skipif(bool(reason_without()), reason=f"no sandbox: {reason_without()}")
POLICY = Policy("http://127.0.0.1:1/v1", "sk-model-own")
OTHERS = Task({"messages": [], "seed": 1, "task": {"secret": "others-task"}}, {"truth": "others-truth"})
SEARCH = """
import glob, json, os
secret, found = os.environ["SECRET_REVERSED"][::-1].encode(), False
for path in glob.glob(os.environ["WHERE"]):
    try:
        with open(path, "rb") as file:
            found = found or secret in file.read()
    except OSError:
        pass
print(json.dumps({"reward": float(found)}))
"""


def python(code: str) -> str:
    return shlex.join([sys.executable, "-I", "-c", code])


def played(agent: str, hidden: Sandbox | None, policy: Policy = POLICY, **env: str) -> float | None:
    async def episode() -> float | None:
        spec = AgentSpec(agent=agent, env=env, sandbox=hidden)
        with Folder() as folder:
            return await runner_of(spec).run(Task({}, {}), policy, folder)

    return asyncio.run(asyncio.wait_for(episode(), HANG_S))


def searched(secret: str, where: str, hidden: Sandbox | None) -> bool:
    """Have an agent search files for a secret."""
    return played(python(SEARCH), hidden, SECRET_REVERSED=secret[::-1], WHERE=where) == 1.0


@pytest.fixture
def other_episode() -> Iterator[None]:
    """Another episode, and a process with its key and the token of a worker."""
    variables = {"OPENAI_API_KEY": "others-key", "HF_TOKEN": "workers-token"}
    folder, loop = Folder(), asyncio.new_event_loop()

    async def remove() -> None:
        folder.__exit__()
        await asyncio.get_running_loop().shutdown_default_executor()

    command = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)", "others-argument"]
    with subprocess.Popen(command, env=variables) as process:
        loop.run_until_complete(folder.make("task.json", OTHERS.shown))
        yield
        process.kill()
        loop.run_until_complete(remove())
        loop.close()


@works
@pytest.mark.parametrize("is_on", [True, False], ids=["sandbox", "without"])
@pytest.mark.parametrize(
    ("secret", "where"),
    [
        ("others-task", f"{tempfile.gettempdir()}/{PREFIX}*/*"),
        ("others-key", "/proc/*/environ"),
        ("workers-token", "/proc/*/environ"),
        # All users may read it, so only a /proc without the process hides it.
        ("others-argument", "/proc/*/cmdline"),
        ("others-task", f"/proc/*/root{tempfile.gettempdir()}/{PREFIX}*/*"),
    ],
)
def test_what_belongs_to_others_cannot_be_read(
    other_episode: None, secret: str, where: str, is_on: bool
) -> None:
    assert searched(secret, where, Sandbox.of(()) if is_on else None) is not is_on


def test_no_file_has_the_ground_truth(tmp_path: Path) -> None:
    """While the other episode is being verified, and without a sandbox."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    held = os.open(gate, os.O_RDWR)
    judge = (
        "import json, os, sys; task = json.load(open(os.environ['ASYNC_PIPELINE_TASK'])); "
        "open(sys.argv[1] + '.reached', 'w'); open(sys.argv[1]).read(); "
        "print(json.dumps({'reward': float(task['truth'] == 'others-truth')}))"
    )

    async def verify() -> float:
        spec = AgentSpec(agent="true", verify=f"{python(judge)} {gate}")
        with Folder() as folder:
            return await verified(spec, folder, OTHERS)

    with ThreadPoolExecutor() as pool:
        reward = pool.submit(lambda: asyncio.run(asyncio.wait_for(verify(), HANG_S)))
        try:
            until(lambda: reward.done() or gate.with_name("gate.reached").exists(), "the judge has its task")
            found = searched("others-truth", f"{tempfile.gettempdir()}/{PREFIX}*/*", None)
        finally:
            os.close(held)
        assert not found
        assert reward.result() == 1.0


@works
@pytest.mark.parametrize("is_on", [True, False], ids=["sandbox", "without"])
@pytest.mark.parametrize("name", ["train.parquet", "run/ledger.jsonl"])
def test_files_of_the_run_cannot_be_read(tmp_path: Path, name: str, is_on: bool) -> None:
    """They are below the folder of the agent's program, which it sees."""
    (tmp_path / "run").mkdir()
    (tmp_path / name).write_text("truth")
    (tmp_path / "agent.py").write_text(SEARCH)
    hidden = Sandbox.of([tmp_path / "train.parquet", tmp_path / "run"]) if is_on else None
    where = str(tmp_path / name)
    agent = shlex.join([sys.executable, str(tmp_path / "agent.py")])
    reward = played(agent, hidden, SECRET_REVERSED="hturt", WHERE=where)
    assert reward == (0.0 if is_on else 1.0)
    assert (tmp_path / name).read_text() == "truth"


CHANGES = """
import json, os, sys
done = 0
for action in (
    lambda: open(os.environ["OUTSIDE"], "a").write("changed"),
    lambda: os.kill(int(os.environ["OTHER"]), 0),
    lambda: os.kill(os.getppid(), 0) or os.readlink(f"/proc/{os.getppid()}/exe"),
):
    try:
        action()
        done += 1
    except OSError:
        pass
open("own", "w").write("mine")
open(os.path.join(os.environ["TMPDIR"], "own")).read()
open(os.path.join(sys.argv[1], "scratch"), "w").write("of this command only")
print(json.dumps({"reward": done}))
"""


@works
@pytest.mark.parametrize(("is_on", "done"), [(True, 0.0), (False, 3.0)], ids=["sandbox", "without"])
def test_only_own_files_can_be_written_and_no_process_is_seen(
    tmp_path: Path, is_on: bool, done: float
) -> None:
    outside = tmp_path / "worker.py"
    outside.write_text("code of the worker")
    hidden = Sandbox.of(()) if is_on else None
    # The folder is named, so the agent sees it, but cannot change it.
    agent = shlex.join([sys.executable, "-I", "-c", CHANGES, tempfile.gettempdir()])
    assert played(agent, hidden, OUTSIDE=str(outside), OTHER=str(os.getpid())) == done
    assert ("changed" in outside.read_text()) is not is_on
    assert (Path(tempfile.gettempdir()) / "scratch").exists() is not is_on
    (Path(tempfile.gettempdir()) / "scratch").unlink(missing_ok=True)


@works
def test_the_sandbox_cannot_be_undone(tmp_path: Path) -> None:
    """By an agent that has root's number, and by one that makes namespaces itself."""
    secret = tmp_path / "secret"
    secret.write_text("truth")
    tries = f"umount /tmp; umount -l {tmp_path}; mount -o remount,rw /; cat {secret}; touch /etc/x; kill -9 1"
    code = f"({tries}); unshare -Urm sh -c {shlex.quote(tries)}; unshare -m sh -c {shlex.quote(tries)}; true"
    command = ["/bin/sh", "-c", code]
    folder = tmp_path / "own"
    folder.mkdir()
    mounts = Sandbox.of([tmp_path]).mounts(command, [folder])
    finished: Finished = asyncio.run(run_command(command, folder, environment({}), mounts=mounts))
    assert finished.status == 0 and "truth" not in finished.stdout, finished
    assert not Path("/etc/x").exists()
    capabilities = "import re; print(re.findall('Cap...:\\t(.*)', open('/proc/self/status').read()))"
    command = [sys.executable, "-I", "-c", capabilities]
    mounts = Sandbox.of(()).mounts(command, [folder])
    finished = asyncio.run(run_command(command, folder, {}, mounts=mounts))
    assert finished.stdout == f"{['0' * 16] * 5}\n", finished


@works
@pytest.mark.parametrize("is_on", [True, False], ids=["sandbox", "without"])
def test_processes_that_leave_their_group_are_ended(tmp_path: Path, is_on: bool) -> None:
    code = (
        "import os, subprocess, sys\n"
        "for _ in range(3):\n"
        "    os.fork() == 0 and os.setsid()\n"
        "subprocess.Popen(['sleep', '600'], start_new_session=True, env={'MARK': sys.argv[1]}, "
        "stdin=-3, stdout=-3, stderr=-3)\n"
    )
    mark = str(tmp_path)
    command = [sys.executable, "-I", "-c", code, f"mark:{mark}"]
    mounts = Sandbox.of(()).mounts(command, [tmp_path]) if is_on else None
    assert asyncio.run(run_command(command, tmp_path, {}, mounts=mounts)).status == 0
    until(lambda: not having(f"MARK=mark:{mark}"), "all are killed")


def having(text: str) -> list[str]:
    """Return the processes with a text in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            found += [str(path)] if text.encode() in path.read_bytes() else []
        except OSError:
            pass
    return found


@works
def test_a_command_has_its_files_and_its_virtual_environment(tmp_path: Path) -> None:
    """Although they are in a folder that is hidden."""
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "pyvenv.cfg").write_text(
        f"home = {os.path.dirname(os.path.realpath(sys.executable))}"
    )
    program = tmp_path / "venv" / "bin" / "python"
    program.symlink_to(os.path.realpath(sys.executable))
    (tmp_path / "project").mkdir()
    helper = tmp_path / "project" / "helper.py"
    helper.write_text("import sys; reward = float(sys.prefix.endswith('venv'))")
    script = tmp_path / "project" / "agent.py"
    script.write_text(
        "import helper, json, os; assert open('/dev/null'); print(json.dumps({'reward': helper.reward}))"
    )
    assert played(shlex.join([str(program), str(script)]), Sandbox.of([tmp_path])) == 1.0


def test_a_temporary_folder_that_a_command_names_is_hidden_wherever_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below /tmp, which is hidden too, it was shown with all that others have in it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    named = [str(tmp_path), str(tmp_path / "file"), str(tmp_path / "folder")]
    assert Sandbox.of(()).mounts(["/bin/cat", *named], ())["shown"] == sorted(named[1:])


@works
def test_verify_is_in_the_sandbox_too(other_episode: None) -> None:
    """What it runs may be the agent's: it sees its own ground truth only, and the agent's folder."""
    judge = (
        "import glob, json, os; task = json.load(open(os.environ['ASYNC_PIPELINE_TASK'])); "
        f"seen = glob.glob('{tempfile.gettempdir()}/{PREFIX}*'); "
        "print(json.dumps({'reward': float(task['truth'] == 42 and open('answer').read() == '42' "
        "and set(seen) == {os.getcwd(), os.environ['HOME']})}))"
    )

    async def episode() -> float:
        answers = python("open('answer', 'w').write('42')")
        spec = AgentSpec(agent=answers, verify=python(judge), sandbox=Sandbox.of(()))
        task = Task({}, {"truth": 42})
        with Folder() as folder:
            await runner_of(spec).run(task, POLICY, folder)
            return await verified(spec, folder, task)

    assert asyncio.run(asyncio.wait_for(episode(), HANG_S)) == 1.0


@works
def test_the_unix_socket_of_the_gateway_is_reached(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "gateway"))
        server.listen()
        code = (
            "import json, os, socket; socket.socket(socket.AF_UNIX)"
            ".connect(os.environ['ASYNC_PIPELINE_UNIX_SOCKET']); print(json.dumps({'reward': 1}))"
        )
        policy = POLICY._replace(unix_socket=str(tmp_path / "gateway"))

        async def episode() -> float | None:
            spec = AgentSpec(agent=python(code), sandbox=Sandbox.of(()))
            with Folder() as folder:
                return await runner_of(spec).run(Task({}, {}), policy, folder)

        assert asyncio.run(asyncio.wait_for(episode(), HANG_S)) == 1.0


CONNECTS = """
import json, os, socket, urllib.request
body = os.environ["BODY_BYTES"].encode()
answer = urllib.request.urlopen(os.environ["OPENAI_BASE_URL"] + "/models", body).read()
assert answer == b"x" * int(body), len(answer)
try:
    socket.create_connection(("127.0.0.1", int(os.environ["OTHER_PORT"])))
    reached = 1.0
except OSError:
    reached = 0.0
print(json.dumps({"reward": reached}))
"""


class Answers(BaseHTTPRequestHandler):
    """A gateway that answers with as many bytes as the request names."""

    def do_POST(self) -> None:  # noqa: N802
        body = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"x" * int(body))


@works
@pytest.mark.parametrize("is_on", [True, False], ids=["offline", "without"])
def test_an_agent_that_is_offline_reaches_the_gateway_only(is_on: bool) -> None:
    """Here, the gateway listens on another address than 127.0.0.1."""
    with (
        ThreadingHTTPServer(("127.0.0.2", 0), Answers) as gateway,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        thread = threading.Thread(target=gateway.serve_forever)
        thread.start()
        try:
            reward = played(
                python(CONNECTS),
                Sandbox.of((), offline=True) if is_on else None,
                Policy(f"http://127.0.0.2:{gateway.server_port}/v1", "sk-model-own"),
                OTHER_PORT=str(other.getsockname()[1]),
                BODY_BYTES=str(1 << 22),
            )
        finally:
            gateway.shutdown()
            thread.join()
    assert reward == (0.0 if is_on else 1.0)


def test_secrets_of_the_user_are_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    (tmp_path / "link").symlink_to("target")
    found = Sandbox.of([tmp_path / "link", "/"]).hidden
    assert {str(tmp_path / name) for name in (".ray", ".ssh", "token", "target")} <= set(found)
    assert "/tmp" in found and "/" not in found


def test_a_machine_without_a_sandbox_gives_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = reason_without.__wrapped__
    refused = Finished(125, "", "no sandbox: unshare: Operation not permitted\n")
    monkeypatch.setattr(sandbox, "try_command", lambda *args: refused)
    assert "unshare: Operation not permitted" in reason()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert reason().endswith("has no namespaces")


def test_a_command_without_its_sandbox_does_not_run() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import command_process as process\n"
        "def refuse(further): raise OSError(1, 'unshare: not permitted')\n"
        "process.new_namespaces = refuse\n"
        "process.run({'command': ['echo', 'ran'], 'cwd': '/', 'env': {}, 'mounts': {}}, None)"
    )
    command = [sys.executable, "-c", code, os.path.dirname(sandbox.__file__)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (made.returncode, made.stdout, made.stderr) == (125, "", "no sandbox: unshare: not permitted\n")
