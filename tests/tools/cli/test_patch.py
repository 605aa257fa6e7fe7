# SPDX-License-Identifier: Apache-2.0
"""`async-pipeline patch`: text, JSON and exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipe.async_pipeline.cli.main import main
from recipe.async_pipeline.installed import verl as installed_verl
from recipe.async_pipeline.installed.verl import require_patched
from recipe.async_pipeline.tools.patches import patched_tree, verl_source
from recipe.async_pipeline.tools.patches.unified_diff import format_diff


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a tree of one file, and a patches folder with one patch of it."""
    folder = tmp_path / "patches"
    folder.mkdir()
    (folder / "PIN").write_text("name: verl\nversion: 1.2\ntag: v1.2\nsha256: 0\n")
    (folder / "series").write_text("1.patch\n")
    (folder / "1.patch").write_bytes(b"Subject: s\n\n" + format_diff("verl/a.py", b"a\n", b"A\n"))
    root = tmp_path / ".cache/verl/verl-1.2"
    (root / "verl/version").mkdir(parents=True)
    (root / "verl/version/version").write_text("1.2\n")
    (root / "verl/__init__.py").write_text("")
    (root / "verl/a.py").write_bytes(b"a\n")
    monkeypatch.setattr(installed_verl, "patches_dir", lambda: folder)
    monkeypatch.setattr(verl_source, "published_file", lambda folder, path: b"a\n")
    return root


def test_apply_status_revert(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["patch", "apply"]) == 0
    assert capsys.readouterr().out == f"{tree}: applied\n  changed verl/a.py\n"
    assert main(["patch", "apply"]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert main(["patch", "status"]) == 0
    assert "  applied   verl/a.py  (1.patch)" in capsys.readouterr().out
    assert main(["patch", "revert", "--verl-dir", str(tree)]) == 0
    assert (tree / "verl/a.py").read_bytes() == b"a\n"


def test_json_is_one_object(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["patch", "status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "action": "status",
        "verl_root": str(tree),
        "overall": "pristine",
        "changed": [],
        "files": [{"path": "verl/a.py", "state": "pristine", "patches": ["1.patch"]}],
    }


def test_refresh_rewrites_the_patch(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / "verl/a.py").write_bytes(b"AAA\n")
    assert main(["patch", "refresh", "1.patch"]) == 0
    assert "changed patches/1.patch" in capsys.readouterr().out
    assert patched_tree.patch_state(tree, folder=installed_verl.patches_dir()).overall == "applied"
    require_patched(tree, installed_verl.ids_for(tree, installed_verl.patches_dir()))


def test_a_diverged_tree_is_a_user_error(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / "verl/a.py").write_bytes(b"edited\n")
    assert main(["patch", "apply"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("async-pipeline patch: cannot patch") and "verl/a.py" in captured.err
    assert captured.err.count("\n") == 1


def test_fetch_links_a_clone(tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clone = tmp_path / "clone"
    tree.rename(clone)
    assert main(["patch", "fetch", "--verl-dir", str(clone)]) == 0
    assert tree.resolve() == clone
    assert capsys.readouterr().out == f"{tree}: pristine\n"


def test_another_version_is_refused(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / "verl/version/version").write_text("1.3\n")
    assert main(["patch", "apply"]) == 2
    assert "is verl 1.3, the patches are for 1.2" in capsys.readouterr().err
