# SPDX-License-Identifier: Apache-2.0
"""An engine core's process begins with its server's, and knows what its server has learned since. (Whole
jobs run with it.)
"""

from __future__ import annotations

import json
import os
from multiprocessing import forkserver, util
from pathlib import Path
from typing import Any

import pytest

from recipe.async_pipeline.verl_bridge.rollout.vllm import prefork
from recipe.async_pipeline.verl_bridge.rollout.vllm.prefork import EARLY, HOME, _Context, begin, started_early


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the fork server was told, instead of starting one."""
    said: list[Any] = []
    monkeypatch.setattr(forkserver, "set_forkserver_preload", said.append)
    monkeypatch.setattr(
        forkserver,
        "ensure_running",
        lambda: said.append((EARLY in os.environ, util.abstract_sockets_supported)),
    )
    monkeypatch.setattr(util, "abstract_sockets_supported", True)
    monkeypatch.setattr(prefork, "_begun", type(prefork._begun)())
    return said


def test_only_the_process_of_a_server_begins_one(started: list[Any]) -> None:
    begin({})
    assert not started
    assert not prefork._begun.is_set()
    prefork.use()


def test_a_server_begins_one_that_is_told_of_no_server(
    started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(EARLY, "1")
    begin()
    assert started == [[HOME], (False, False)], "and its socket is in a folder of its own"
    assert prefork._begun.is_set()


@pytest.mark.slow
def test_vllm_is_given_processes_that_are_forked_from_there(
    started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    utils = pytest.importorskip("vllm.v1.engine.utils")
    asked = []
    monkeypatch.setattr(utils, "get_mp_context", lambda: asked.append("vLLM's own"))
    begin({EARLY: "1"})
    prefork.use()
    assert utils.get_mp_context().get_start_method() == "forkserver"
    assert asked == ["vLLM's own"]


def _tell(file: Path) -> None:
    pytest.importorskip("setproctitle").setproctitle("VLLM::EngineCore")
    said = dict(os.environ) | {"title": Path("/proc/self/cmdline").read_text().rstrip("\0")}
    file.write_text(json.dumps(said))


def test_a_process_has_the_environment_of_the_one_that_made_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BEFORE", "there when the fork server was started")
    forkserver.ensure_running()
    monkeypatch.delenv("BEFORE")
    monkeypatch.setenv("AFTER", "1")
    process = _Context().Process(target=_tell, args=(tmp_path / "environment",))
    process.start()
    process.join()
    said = json.loads((tmp_path / "environment").read_text())
    assert said["AFTER"] == "1"
    assert "BEFORE" not in said
    assert said["title"] == "VLLM::EngineCore", "by which people, and our own measurements, know it"


def test_ray_is_told_beside_what_verl_tells_it() -> None:
    class Class:
        def options(self, **options: Any) -> dict[str, Any]:
            return options

    made = started_early(Class()).options(
        name="a server", runtime_env={"env_vars": {"A": "1"}, "working_dir": None}
    )
    assert made == {
        "name": "a server",
        "runtime_env": {"env_vars": {"A": "1", EARLY: "1"}, "working_dir": None},
    }
