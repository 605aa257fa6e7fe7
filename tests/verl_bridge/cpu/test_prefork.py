# SPDX-License-Identifier: Apache-2.0
"""The fork server for engine cores starts early, and its processes get the current environment.

End-to-end tests run whole jobs with it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from multiprocessing import forkserver, util
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from recipe.async_pipeline.verl_bridge import replaced
from recipe.async_pipeline.verl_bridge.cpu import prefork
from recipe.async_pipeline.verl_bridge.cpu.prefork import EARLY, FIRST, Context, begin, started_early
from tests import HANG_S, REPOSITORY


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record the settings and starts of the fork server, without starting one."""
    calls: list[Any] = []
    monkeypatch.setattr(forkserver, "set_forkserver_preload", calls.append)
    monkeypatch.setattr(
        forkserver,
        "ensure_running",
        lambda: calls.append((EARLY in os.environ, util.abstract_sockets_supported)),
    )
    monkeypatch.setattr(util, "abstract_sockets_supported", True)
    monkeypatch.setattr(prefork, "_begun", Event())
    return calls


def test_only_a_server_process_starts_the_fork_server(started: list[Any]) -> None:
    begin({})
    assert not started and not prefork.begun()
    begin({EARLY: "other"})
    assert started and prefork.begun()


def test_the_fork_server_does_not_inherit_the_switch(
    started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(EARLY, "other")
    begin()
    assert started == [[FIRST], (False, False)], "without the switch; with a socket in a private folder"


@pytest.mark.slow
def test_vllm_forks_processes_from_the_fork_server(
    started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    utils = pytest.importorskip("vllm.v1.engine.utils")
    calls = []
    monkeypatch.setattr(utils, "get_mp_context", lambda: calls.append("vLLM's own"))
    begin({EARLY: "other"})
    replaced.apply("vLLM's server")
    assert utils.get_mp_context().get_start_method() == "forkserver"
    assert calls == ["vLLM's own"]


def _write_environment(file: Path) -> None:
    pytest.importorskip("setproctitle").setproctitle("VLLM::EngineCore")
    found = dict(os.environ) | {"title": Path("/proc/self/cmdline").read_text().rstrip("\0")}
    file.write_text(json.dumps(found))


def test_a_process_has_the_environment_of_its_creator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BEFORE", "set when the fork server started")
    forkserver.ensure_running()
    monkeypatch.delenv("BEFORE")
    monkeypatch.setenv("AFTER", "1")
    process = Context().Process(target=_write_environment, args=(tmp_path / "environment",))
    process.start()
    process.join()
    found = json.loads((tmp_path / "environment").read_text())
    assert found["AFTER"] == "1"
    assert "BEFORE" not in found
    assert found["title"] == "VLLM::EngineCore", "users and `bench` identify the process by its title"


def preforked(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.fakes.preforked", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=HANG_S)


def test_with_the_imports_made_the_fork_server_is_a_fork() -> None:
    done = preforked()
    assert done.stdout.splitlines() == ["True True 0 0"], done.stderr


def test_a_fork_server_that_fails_says_why() -> None:
    done = preforked("broken")
    assert "RuntimeError: no descriptors are left" in done.stderr
    assert done.stdout.startswith("the fork server ended while it started "), done.stderr


def test_the_switch_is_added_to_verls_runtime_environment() -> None:
    class Class:
        def options(self, **options: Any) -> dict[str, Any]:
            return options

    made = started_early(Class(), "other").options(
        name="a server", runtime_env={"env_vars": {"A": "1"}, "working_dir": None}
    )
    assert made == {
        "name": "a server",
        "runtime_env": {"env_vars": {"A": "1", EARLY: "other"}, "working_dir": None},
    }
