# SPDX-License-Identifier: Apache-2.0
"""The output of failed agents: one file each, the newest ones only."""

from __future__ import annotations

import os
from pathlib import Path

from recipe.async_pipeline.observe.run_directory.agent_output import (
    FOLDER,
    AgentOutputFolder,
    FailedAttempt,
    read_outputs,
)


def attempt(episode: str, number: int = 1, output: str = "Traceback\n") -> FailedAttempt:
    return FailedAttempt(episode, number, "agent_failed", "exit status 1: é", output)


def test_a_file_says_what_failed_and_has_the_output(tmp_path: Path) -> None:
    folder = AgentOutputFolder(tmp_path)
    assert read_outputs(tmp_path) == []
    folder.add(3, [attempt("u_0", 2, "one\ntwo")])
    (found,) = read_outputs(tmp_path)
    assert found == (tmp_path / FOLDER / "u_0-attempt-2.txt", "u_0", 2, "agent_failed", "exit status 1: é")
    first, _, output = found.path.read_text(encoding="utf-8").partition("\n")
    assert '"step": 3' in first and output == "one\ntwo"


def test_the_newest_files_are_kept_also_by_another_process(tmp_path: Path) -> None:
    AgentOutputFolder(tmp_path, 3).add(1, [attempt(f"u_{i}") for i in range(3)])
    for i, at in enumerate((30, 10, 20)):
        os.utime(tmp_path / FOLDER / f"u_{i}-attempt-1.txt", (at, at))
    AgentOutputFolder(tmp_path, 3).add(2, [attempt("v_0"), attempt("v_1")])
    assert [one.episode for one in read_outputs(tmp_path)] == ["u_0", "v_0", "v_1"]


def test_a_name_is_no_path(tmp_path: Path) -> None:
    AgentOutputFolder(tmp_path).add(1, [attempt("../u/0_1")])
    assert [one.path.parent for one in read_outputs(tmp_path)] == [tmp_path / FOLDER]


def test_files_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    folder.mkdir()
    for name, text in (("a", ""), ("b", "no JSON\n"), ("c", "[]\n"), ("d", '{"episode": "x"}\n')):
        (folder / f"{name}-attempt-1.txt").write_text(text)
    (folder / "e-attempt-1.txt").symlink_to(tmp_path / "gone")
    AgentOutputFolder(tmp_path).add(1, [attempt("u_0")])
    assert [one.episode for one in read_outputs(tmp_path)] == ["u_0"]
