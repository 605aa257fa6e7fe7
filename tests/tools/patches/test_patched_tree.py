# SPDX-License-Identifier: Apache-2.0
"""State, apply and revert: on a tree of three small files, then on the published verl."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from recipe.async_pipeline.errors import PatchError
from recipe.async_pipeline.installed import verl as installed_verl
from recipe.async_pipeline.installed.verl import patches_dir
from recipe.async_pipeline.tools.patches import patched_tree
from recipe.async_pipeline.tools.patches.unified_diff import format_diff
from tests.fakes.patch_folder import APPLIED, HEADER, PRISTINE, contents, expected, write


def test_apply_then_revert_restores_byte_for_byte(tree: Path, folder: Path) -> None:
    assert patched_tree.patch_state(tree, folder=folder).overall == "pristine"
    assert patched_tree.apply(tree, folder=folder) == ("verl/a.py", "verl/new.py")
    assert contents(tree) == expected(APPLIED)
    assert patched_tree.patch_state(tree, folder=folder).overall == "applied"
    assert patched_tree.revert(tree, folder=folder) == ("verl/a.py", "verl/new.py")
    assert contents(tree) == expected(PRISTINE)
    assert not (tree / patched_tree.RECORD).exists()


@pytest.mark.parametrize("action", [patched_tree.apply, patched_tree.revert])
def test_apply_and_revert_are_idempotent(tree: Path, folder: Path, action: object) -> None:
    assert callable(action)
    action(tree, folder=folder)
    before = {file: file.stat().st_mtime_ns for file in tree.rglob("*.py")}
    assert action(tree, folder=folder) == ()
    assert {file: file.stat().st_mtime_ns for file in tree.rglob("*.py")} == before


@pytest.mark.parametrize("action", [patched_tree.apply, patched_tree.revert])
@pytest.mark.parametrize("start", [PRISTINE, APPLIED], ids=["pristine", "applied"])
@pytest.mark.parametrize("edited", ["verl/a.py", "verl/new.py"])
def test_a_diverged_tree_is_refused_and_untouched(
    tree: Path, folder: Path, action: object, start: dict[str, bytes], edited: str
) -> None:
    assert callable(action)
    write(tree, {**start, edited: b"edited\n"})
    before = contents(tree)
    with pytest.raises(PatchError, match=rf"{edited} .*nothing was changed.*patch refresh"):
        action(tree, folder=folder)
    assert contents(tree) == before
    assert not list(tree.glob(".staging*"))
    states = {file.path: file.state for file in patched_tree.patch_state(tree, folder=folder).files}
    assert states[edited] == "diverged"


def test_a_half_applied_tree_is_completed(tree: Path, folder: Path) -> None:
    write(tree, {"verl/new.py": APPLIED["verl/new.py"]})
    assert patched_tree.patch_state(tree, folder=folder).overall == "diverged"
    assert patched_tree.apply(tree, folder=folder) == ("verl/a.py",)
    assert contents(tree) == expected(APPLIED)


def test_a_failing_swap_leaves_no_file_half_written(
    tree: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(source: object, target: object) -> None:
        raise OSError("disk")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk"):
        patched_tree.apply(tree, folder=folder)
    assert contents(tree) == expected(PRISTINE)


def test_a_tree_of_an_older_series_is_brought_up_to_date(tree: Path, folder: Path) -> None:
    patched_tree.apply(tree, folder=folder)
    (folder / "2.patch").unlink()
    newer = {"verl/a.py": b"one\nzwei\nthree\n"}
    write(
        folder,
        {
            "series": b"1.patch\n",
            "1.patch": HEADER + format_diff("verl/a.py", PRISTINE["verl/a.py"], newer["verl/a.py"]),
        },
    )
    assert patched_tree.patch_state(tree, folder=folder).overall == "diverged"
    assert patched_tree.apply(tree, folder=folder) == ("verl/a.py", "verl/new.py")
    assert contents(tree) == expected({**PRISTINE, **newer})
    patched_tree.revert(tree, folder=folder)
    assert contents(tree) == expected(PRISTINE)


def test_the_real_series_on_the_published_verl(published_verl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, root = patches_dir(), published_verl
    published = contents(root)
    patched_tree.apply(root, folder=folder)
    state, read = patched_tree.patch_state(root, folder=folder), list[str]()
    assert state.overall == "applied" and len(state.files) >= 7

    def noted(file: Path) -> bytes | None:
        read.append(file.relative_to(root).as_posix())
        return plain(file)

    plain = installed_verl.read_or_none
    with monkeypatch.context() as patch:
        patch.setattr(installed_verl, "read_or_none", noted)
        installed_verl.require_patched(root)
    assert read == [file.path for file in state.files], "every trainer runs this check at startup"
    assert contents(root).keys() - published.keys() == {"verl/trainer/ppo/pipeline.py"}
    patched_tree.revert(root, folder=folder)
    assert contents(root) == published
