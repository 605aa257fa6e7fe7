# SPDX-License-Identifier: Apache-2.0
"""Worker processes are forked from one that has made the imports; with real Ray."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray._private import ray_constants

from recipe.async_pipeline.verl_bridge.cpu import fork_worker
from tests import HANG_S, REPOSITORY
from tests.fakes.ray_nodes import start_ray
from tests.fakes.waiting import until

pytestmark = pytest.mark.real_engine

MODULE = "this"
"""A module that nothing else imports, and that prints: so it is seen how often it was imported."""


@contextmanager
def ray_with(imports: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_constants, "SETUP_WORKER_FILENAME", fork_worker.__file__)
        patch.setenv(fork_worker.IMPORTS, imports)
        patch.setenv("PYTHONPATH", str(REPOSITORY))
        start_ray()
        try:
            yield
        finally:
            ray.shutdown()


@pytest.fixture(scope="module")
def forking() -> Iterator[None]:
    with ray_with(f"{MODULE},tests.fakes.import_that_sets"):
        yield


def random_id() -> str:
    return str(ray.ObjectRef.from_random().hex())


def ids_of_threads() -> Iterator[str]:
    """Draw in new threads, whose sequences Ray seeds from eight states of the process."""
    for _ in range(16):
        with ThreadPoolExecutor(1) as thread:
            yield thread.submit(random_id).result()


class Worker:
    def facts(self) -> dict[str, Any]:
        import numpy

        return {
            "forked": MODULE in sys.modules,
            "server": os.getppid(),
            "pid": os.getpid(),
            "own": os.environ.get("OWN"),
            "set": os.environ.get("SET_BY_AN_IMPORT"),
            "folder": os.getcwd(),
            "drawn": (numpy.random.random(), random_id(), *ids_of_threads()),
            "arguments": sys.argv,
        }

    def leave(self, folder: Path) -> None:
        """Exit. Files in a folder say what still ran."""
        atexit.register((folder / "handler").touch)
        vars(sys.modules[MODULE])["left"] = Left(folder / "torn_down")
        ray.actor.exit_actor()


class Left:
    """What a module still has at the end."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __del__(self) -> None:
        self._file.touch()


def has_ended(process: psutil.Process) -> bool:
    """Return whether it is gone, or waits to be reaped by who has adopted it."""
    with suppress(psutil.NoSuchProcess):
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    return True


def worker(**variables: str) -> Any:
    actor: Any = ray.remote(num_cpus=0, max_restarts=1, max_task_retries=1)(Worker)
    return actor.options(runtime_env={"env_vars": {"A": "1", **variables}} if variables else None).remote()


def facts(actor: Any) -> dict[str, Any]:
    found: dict[str, Any] = ray.get(actor.facts.remote(), timeout=HANG_S)
    return found


@pytest.mark.usefixtures("forking")
def test_workers_share_imports_and_nothing_else() -> None:
    workers = [worker(OWN=str(i)) for i in range(2)]
    first, second = map(facts, workers)
    assert first["forked"]
    assert second["forked"]
    assert first["server"] == second["server"]
    assert first["pid"] != second["pid"]
    assert (first["own"], second["own"]) == ("0", "1")
    assert (first["set"], second["set"]) == ("1", "1")
    assert set(first["drawn"]).isdisjoint(second["drawn"])
    assert first["folder"] == second["folder"]
    assert first["arguments"][0].endswith("default_worker.py")
    assert not [word for word in first["arguments"] if "runtime-env-context" in word]


@pytest.mark.usefixtures("forking")
def test_a_worker_starts_as_ray_starts_it_if_a_fork_could_not_serve_it() -> None:
    facts(worker(OWN="there is a fork server"))
    others = [worker(**variables) for variables in ({}, {"PYTHONNODEBUGRANGES": "1"}, {"TORCH_LOGS": "help"})]
    assert [facts(actor)["forked"] for actor in others] == [False] * 3


@pytest.mark.usefixtures("forking")
def test_the_server_survives_a_process_that_ends_while_it_asks() -> None:
    before = facts(worker(OWN="before"))
    session = Path(ray._private.worker._global_node.get_sockets_dir_path())
    (path,) = session.glob("fork.*")
    for part in (b"", b"\0" * 7 + b"\x09" + b"[1,"):
        with socket.socket(socket.AF_UNIX) as asking:
            asking.connect(str(path))
            asking.sendall(part)
    assert facts(worker(OWN="after"))["server"] == before["server"]


@pytest.mark.usefixtures("forking")
def test_a_worker_ends_without_tearing_down_what_the_server_imported(tmp_path: Path) -> None:
    actor = worker(OWN="ends")
    process = psutil.Process(facts(actor)["pid"])
    actor.leave.remote(tmp_path)
    until(lambda: has_ended(process), "the worker ends")
    assert [file.name for file in tmp_path.iterdir()] == ["handler"]


@pytest.mark.usefixtures("forking")
def test_a_worker_that_is_killed_is_reaped_and_the_server_ends_with_its_node() -> None:
    actor = worker(OWN="killed")
    before = facts(actor)
    server = psutil.Process(before["server"])
    assert Path(fork_worker.__file__).name in " ".join(server.cmdline())
    os.kill(before["pid"], signal.SIGKILL)
    after = facts(actor)
    assert after["pid"] != before["pid"]
    assert after["server"] == before["server"]
    until(lambda: not psutil.pid_exists(before["pid"]), "the process is reaped")
    ray.shutdown()
    until(lambda: has_ended(server), "the server ends")


@pytest.mark.parametrize("module", ["no_such_module", "tests.fakes.import_that_draws"])
def test_imports_that_fail_or_draw_an_id_leave_workers_as_ray_starts_them(module: str) -> None:
    with ray_with(f"{MODULE},{module}"):
        found = facts(worker(OWN="yes"))
    assert not found["forked"]
    assert found["own"] == "yes"
