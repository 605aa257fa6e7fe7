# SPDX-License-Identifier: Apache-2.0
"""Requests about replicas and their answers travel as files."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from recipe.async_pipeline.errors import RunFilesError, WaitTimeout
from recipe.async_pipeline.observe.run_directory.replica_requests import (
    FOLDER,
    ask,
    close_folder,
    open_folder,
    take,
)
from recipe.async_pipeline.observe.run_directory.summary import write_atomically


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    open_folder(tmp_path / FOLDER)
    return tmp_path / FOLDER


def serve(folder: Path, answer: object) -> list[dict[str, object]]:
    """Answer one request, as a run does."""
    while not (found := take(folder)):
        pass
    for path, _ in found:
        write_atomically(path, answer)
    return [request for _, request in found]


def test_a_request_gets_its_answer_and_leaves_no_file(folder: Path) -> None:
    asked: list[dict[str, object]] = []
    run = threading.Thread(target=lambda: asked.extend(serve(folder, {"added": ["replica 2"]})))
    run.start()
    assert ask(folder.parent, {"action": "add", "count": 1}, 60.0) == {"added": ["replica 2"]}
    run.join()
    assert asked == [{"action": "add", "count": 1}]
    assert list(folder.iterdir()) == []


def test_an_answer_that_is_no_object_is_refused(folder: Path) -> None:
    run = threading.Thread(target=lambda: serve(folder, [1]))
    run.start()
    with pytest.raises(RunFilesError, match="holds no JSON object; repeat the request"):
        ask(folder.parent, {}, 60.0)
    run.join()


def test_without_a_run_a_request_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFilesError, match="has no run that takes requests"):
        ask(tmp_path, {}, 60.0)


def test_a_run_that_does_not_answer_is_reported(folder: Path) -> None:
    with pytest.raises(WaitTimeout, match=r"did not answer within 0.1 s; check that it still runs"):
        ask(folder.parent, {}, 0.1)
    assert list(folder.iterdir()) == []


def test_what_is_no_request_is_dropped(folder: Path) -> None:
    (folder / "request-1.json").write_text("not json")
    (folder / "request-2.part").write_text("{")
    assert [request for _, request in take(folder)] == [{}]
    assert take(folder) == []


def test_requests_to_an_earlier_process_are_dropped_and_the_end_of_a_run_removes_the_folder(
    folder: Path,
) -> None:
    (folder / "request-1.json").write_text("{}")
    open_folder(folder)
    assert take(folder) == []
    (folder / "request-2.part").write_text("{")
    close_folder(folder)
    assert not folder.exists()
