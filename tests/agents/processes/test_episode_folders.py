# SPDX-License-Identifier: Apache-2.0
"""The folder of an episode is deleted with it, and by the next process if its owner was killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from recipe.async_pipeline.agents.processes import sandbox
from recipe.async_pipeline.agents.processes.sandbox import MARK, PREFIX, Folder, delete_abandoned
from tests import HANG_S
from tests.fakes.descriptors import open_below
from tests.fakes.waiting import until

OWNER = """
import asyncio, sys
from recipe.async_pipeline.agents.processes.sandbox import Folder

async def own():
    with Folder() as folder:
        await folder.make("task.json", {})
        print(folder.path, flush=True)
        await asyncio.sleep(600)

asyncio.run(own())
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def names(place: Path) -> list[str]:
    return os.listdir(place)


def test_a_folder_is_deleted_with_its_episode(place: Path) -> None:
    async def test() -> None:
        with Folder() as folder:
            assert names(place) == []
            await folder.make("task.json", {"text": "x"})
            (name,) = names(place)
            assert folder.path == place / name and name.startswith(PREFIX)
            assert sorted(names(folder.path)) == [MARK, "task.json"]
            assert delete_abandoned(place) == 0 and names(place) == [name], "it has an owner"

    asyncio.run(test())
    assert names(place) == []


def test_one_that_was_never_made_deletes_nothing(place: Path) -> None:
    with Folder() as folder:
        pass
    assert folder.path == Path() and names(place) == []


def test_the_folders_of_a_killed_process_are_deleted_by_the_next_one(place: Path) -> None:
    env = {**os.environ, "TMPDIR": str(place), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    owner = subprocess.Popen([sys.executable, "-c", OWNER], env=env, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    with owner.stdout as said:
        folder = Path(said.readline().strip())
    (folder / "deep").mkdir()
    (folder / "deep" / "file").write_text("x")
    assert delete_abandoned(place) == 0 and folder.is_dir(), "its owner lives"
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    assert folder.is_dir()

    async def next_one() -> None:
        with Folder() as own:
            await own.make("task.json", {})
            assert names(place) == [own.path.name]

    asyncio.run(next_one())


def test_a_process_looks_once_in_each_place(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Path] = []
    monkeypatch.setattr(sandbox, "delete_abandoned", looked.append)

    async def test() -> None:
        for _ in range(2):
            with Folder() as folder:
                await folder.make("task.json", {})

    asyncio.run(test())
    assert looked == [place]
    until(lambda: names(place) == [], "the folders are deleted")


def test_what_is_no_folder_of_an_episode_stays(place: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / MARK).touch()
    (place / f"{PREFIX}link").symlink_to(elsewhere)
    (place / f"{PREFIX}file").write_text("")
    for name in (f"new-{PREFIX}begun", "episode-1", "other", f"{PREFIX}foreign"):
        (place / name).mkdir()
    for name in (f"new-{PREFIX}begun", "episode-1", "other"):
        (place / name / MARK).touch()
    assert delete_abandoned(place) == 0
    assert len(names(place)) == 6 and (elsewhere / MARK).exists()
    (place / f"{PREFIX}abandoned").mkdir()
    (place / f"{PREFIX}abandoned" / MARK).touch()
    assert delete_abandoned(place) == 1 and len(names(place)) == 6


def test_a_folder_whose_making_is_cancelled_is_deleted_with_its_lock(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, release = threading.Event(), threading.Event()
    mkdtemp = tempfile.mkdtemp

    def slow(**options: str) -> str:
        begun.set()
        release.wait()
        return mkdtemp(**options)

    async def story() -> None:
        async def own() -> None:
            with Folder() as folder:
                await folder.make("task.json", {})

        owning = asyncio.create_task(own())
        await asyncio.get_running_loop().run_in_executor(None, begun.wait)
        owning.cancel()
        await asyncio.wait({owning})
        assert owning.cancelled()
        release.set()
        while names(place) or open_below(place):  # noqa: ASYNC110 - a file system has no event for it
            await asyncio.sleep(0.01)

    monkeypatch.setattr(tempfile, "mkdtemp", slow)
    asyncio.run(asyncio.wait_for(story(), HANG_S))
