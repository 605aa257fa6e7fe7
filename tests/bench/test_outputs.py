# SPDX-License-Identifier: Apache-2.0
"""What could not be written at the end is said at the beginning."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from recipe.async_pipeline.bench.outputs import check_outputs, job_logs
from recipe.async_pipeline.errors import ConfigError


def test_what_can_be_written_is_fine(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    check_outputs(None, None, None)
    (tmp_path / "empty").mkdir()
    for logs in (tmp_path / "new", tmp_path / "empty"):
        check_outputs(tmp_path / "b.json", tmp_path / "b.png", logs)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--json .*: there is no folder"):
        check_outputs(tmp_path / "x" / "b.json", None, None)
    with pytest.raises(ConfigError, match="--picture .*: there is no folder"):
        check_outputs(None, tmp_path / "x" / "b.png", None)


def test_logs_are_not_mixed(tmp_path: Path) -> None:
    (tmp_path / "job.log").touch()
    with pytest.raises(ConfigError, match="is not empty"):
        check_outputs(None, None, tmp_path)


def test_a_picture_needs_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        check_outputs(None, tmp_path / "b.png", None)


@pytest.mark.parametrize("option", ["--json", "--picture"])
def test_a_folder_is_no_file(tmp_path: Path, option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option} .* cannot be written"):
        check_outputs(
            tmp_path if option == "--json" else None, tmp_path if option == "--picture" else None, None
        )


def test_a_picture_is_one_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must end in one of \.png"):
        check_outputs(None, tmp_path / "b.json", None)


def test_two_files_are_not_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--json and the picture are both"):
        check_outputs(tmp_path / "b.png", tmp_path / "b.png", None)


def test_logs_that_nobody_asked_for_are_kept_for_failures_only(tmp_path: Path) -> None:
    failed: dict[str, str] = {}
    with job_logs(None, failed) as folder:
        (folder / "job.log").touch()
    assert not folder.exists()
    with job_logs(None, failed) as folder:
        failed["arm"] = "why"
    assert folder.exists()
    folder.rmdir()
    with pytest.raises(RuntimeError), job_logs(None, {}) as folder:
        raise RuntimeError
    assert folder.exists()
    folder.rmdir()


def test_logs_with_a_name_are_kept(tmp_path: Path) -> None:
    with job_logs(tmp_path / "logs", {}) as folder:
        folder.mkdir()
    assert folder == (tmp_path / "logs").resolve()
    assert folder.exists()
