# SPDX-License-Identifier: Apache-2.0
"""Two hosts on one machine, without the Ray nodes in them: tests/e2e/test_hosts.py runs a job on those."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipe.async_pipeline import processes
from recipe.async_pipeline.errors import ConfigError
from recipe.async_pipeline.lab.bench import two_hosts
from recipe.async_pipeline.lab.bench.runner import JobFailed
from recipe.async_pipeline.lab.bench.two_hosts import Host, TwoHosts
from recipe.async_pipeline.weight_sync.memory.segment_names import PREFIX
from tests import HANG_S
from tests.fakes.private_mounts import may_unshare
from tests.fakes.waiting import until

root_only = pytest.mark.skipif(not may_unshare(), reason="namespaces require root")


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoHosts]:
    monkeypatch.setattr(TwoHosts, "_start_ray", lambda self, first, second: None)
    made = TwoHosts(1, 1, {"GREETING": "hello"})
    yield made
    made.close()


@root_only
def test_hosts_have_their_own_memory_and_reach_each_other(hosts: TwoHosts, tmp_path: Path) -> None:
    name, told = f"{PREFIX}1-2-3", tmp_path / "told"
    hosts.second.run("bash", "-c", f'echo "$GREETING" > {told}; head -c 8192 /dev/zero > /dev/shm/{name}')
    assert told.read_text() == "hello\n"
    assert hosts.second.segments() == {name: 8192}
    assert hosts.first.segments() == {}
    hosts.first.run("python3", "-c", f"import socket; socket.socket().bind(('{hosts.first.address}', 0))")
    with pytest.raises(JobFailed, match=r"python3 on 10\.77\.0\.1"):
        hosts.first.run(
            "python3", "-c", f"import socket; socket.socket().bind(('{hosts.second.address}', 0))"
        )


@root_only
@pytest.mark.parametrize("slow_starts", [1, 2, 3])
def test_a_slow_start_of_ray_is_repeated_without_its_processes(
    hosts: TwoHosts, monkeypatch: pytest.MonkeyPatch, slow_starts: int
) -> None:
    plain, left = hosts.first.run, list[subprocess.Popen[bytes]]()

    def run(*command: str) -> None:
        if not any(word == "start" for word in command):
            return plain(*command)
        assert all(process.wait(HANG_S) == -9 for process in left), "what the last start has left behind"
        if len(left) < slow_starts:
            left.append(subprocess.Popen([*hosts.first.prefix, "sleep", "100"]))
            pid = left[-1].pid
            until(lambda: Path(f"/proc/{pid}/comm").read_text() == "sleep\n", "the process to run there")
            raise JobFailed("ray on 10.77.0.1: The current node timed out during startup.")

    monkeypatch.setattr(hosts.first, "run", run)
    if slow_starts == processes.STARTS:
        with pytest.raises(JobFailed, match="timed out during startup"):
            hosts.first.start_ray("--head")
    else:
        hosts.first.start_ray("--head")
    assert len(left) == slow_starts
    assert not hosts.first.is_lost
    hosts.first.end_processes()
    assert all(process.wait(HANG_S) == -9 for process in left)


@root_only
def test_another_error_of_ray_is_raised_at_once(hosts: TwoHosts, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = list[str]()

    def run(*command: str) -> None:
        tried.append(command[-1])
        raise JobFailed("no such option")

    with monkeypatch.context() as during:
        during.setattr(hosts.first, "run", run)
        with pytest.raises(JobFailed, match="no such option"):
            hosts.first.start_ray("--head")
    assert tried == ["--head"]


@root_only
def test_a_command_that_takes_too_long_has_failed(hosts: TwoHosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the start of Ray is repeated, also if it takes too long without an error of Ray."""
    monkeypatch.setattr(two_hosts, "LIMIT_S", 0.5)
    with pytest.raises(JobFailed, match=rf"sleep on 10\.77\.0\.1 {processes.SLOW_START} after 0\.5 s"):
        hosts.first.run("sleep", "100")


@root_only
def test_a_lost_host_has_no_processes(hosts: TwoHosts) -> None:
    sleeper = subprocess.Popen([*hosts.second.prefix, "sleep", "100"])
    until(lambda: Path(f"/proc/{sleeper.pid}/comm").read_text() == "sleep\n", "the process to run there")
    hosts.second.lose()
    assert sleeper.wait(HANG_S) == -9
    assert hosts.second.is_lost and not hosts.first.is_lost


@root_only
def test_processes_end_with_a_host_whose_holder_was_killed(hosts: TwoHosts) -> None:
    sleeper = subprocess.Popen([*hosts.second.prefix, "sleep", "100"])
    until(lambda: Path(f"/proc/{sleeper.pid}/comm").read_text() == "sleep\n", "the process to run there")
    os.kill(hosts.second.pid, signal.SIGKILL)
    until(lambda: hosts.second.is_lost, "the host to be lost")
    hosts.close()
    assert sleeper.wait(HANG_S) == -9


def test_without_the_right_to_namespaces_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def popen(command: list[str], **others: Any) -> subprocess.Popen[str]:
        return subprocess_popen(["bash", "-c", "echo not permitted >&2; exit 1"], **others)

    subprocess_popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", popen)
    with pytest.raises(ConfigError, match="must not create: not permitted; run as root"):
        Host(1, {})


@pytest.mark.parametrize("ended", [False, True])
def test_the_second_host_is_released_at_a_line_of_the_log(
    ended: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the job has ended before."""
    monkeypatch.setattr(two_hosts, "WAIT_S", 0.001)
    log, released = tmp_path / "job.log", threading.Event()
    first = SimpleNamespace(is_lost=ended)
    hosts: Any = SimpleNamespace(first=first, release=released.set)
    waiting = threading.Thread(target=TwoHosts.release_after, args=(hosts, "starting", log))
    waiting.start()
    if not ended:
        log.write_text("before\n")
        assert not released.is_set()
        log.write_text("before\nstarting\n")
    waiting.join()
    assert released.is_set() is not ended
