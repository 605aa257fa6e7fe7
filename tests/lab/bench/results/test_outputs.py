# SPDX-License-Identifier: Apache-2.0
"""Outputs that cannot be written are errors before a benchmark starts."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import pytest

from recipe.async_pipeline.errors import ConfigError
from recipe.async_pipeline.lab.bench.results.outputs import add_logs_option, check_outputs, job_logs


def test_valid_outputs_are_accepted(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    check_outputs(None, None, None)
    (tmp_path / "empty").mkdir()
    for logs in (tmp_path / "new", tmp_path / "empty"):
        check_outputs(tmp_path / "b.json", tmp_path / "b.png", logs)


def test_a_missing_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--json .*: the directory .* does not exist"):
        check_outputs(tmp_path / "x" / "b.json", None, None)
    with pytest.raises(ConfigError, match="--picture .*: the directory .* does not exist"):
        check_outputs(None, tmp_path / "x" / "b.png", None)


def test_logs_need_an_empty_directory(tmp_path: Path) -> None:
    (tmp_path / "job.log").touch()
    with pytest.raises(ConfigError, match="is not empty"):
        check_outputs(None, None, tmp_path)


def test_a_picture_needs_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        check_outputs(None, tmp_path / "b.png", None)


@pytest.mark.parametrize("option", ["--json", "--picture"])
def test_a_directory_in_place_of_a_file_is_an_error(tmp_path: Path, option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option} .* cannot be written"):
        check_outputs(
            tmp_path if option == "--json" else None, tmp_path if option == "--picture" else None, None
        )


def test_the_suffix_of_a_picture_is_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must end in one of \.png"):
        check_outputs(None, tmp_path / "b.json", None)


def test_json_and_picture_must_be_different_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--json and the picture are both"):
        check_outputs(tmp_path / "b.png", tmp_path / "b.png", None)


def test_temporary_logs_are_kept_only_after_a_failure(tmp_path: Path) -> None:
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


def test_named_logs_are_kept(tmp_path: Path) -> None:
    with job_logs(tmp_path / "logs", {}) as folder:
        folder.mkdir()
    assert folder == (tmp_path / "logs").resolve()
    assert folder.exists()


@pytest.mark.parametrize("arguments", [["--logs", "d", "sub"], ["sub", "--logs", "d"]])
def test_logs_may_be_named_before_and_after_the_subcommand(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--logs", type=Path)
    add_logs_option(parser.add_subparsers().add_parser("sub"))
    assert parser.parse_args(arguments).logs == Path("d")
    assert parser.parse_args(["sub"]).logs is None
