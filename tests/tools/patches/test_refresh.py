# SPDX-License-Identifier: Apache-2.0
"""Refresh a patch from an edited tree: small trees first, then the published verl."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from recipe.async_pipeline.errors import PatchError
from recipe.async_pipeline.installed.verl import patches_dir
from recipe.async_pipeline.tools.patches import patched_tree, series
from recipe.async_pipeline.tools.patches.refresh import refresh
from tests.fakes.patch_folder import HEADER, PRISTINE, contents, expected, write

TODAY = datetime.date(2026, 11, 21)


def test_refresh_takes_the_edit_and_keeps_the_header(tree: Path, folder: Path) -> None:
    patched_tree.apply(tree, folder=folder)
    write(tree, {"verl/a.py": b"zero\none\nTWO\nthree\nfour\n"})
    assert refresh("2.patch", tree, pristine=PRISTINE.get, folder=folder, today=TODAY)
    text = (folder / "2.patch").read_bytes()
    assert text.startswith(b"Subject: s\nWhy: w\nLast-Update: 2026-11-21\n\ndiff --git a/verl/a.py")
    assert patched_tree.patch_state(tree, folder=folder).overall == "applied"
    patched_tree.revert(tree, folder=folder)
    assert contents(tree) == expected(PRISTINE)


def test_refresh_without_an_edit_changes_nothing(tree: Path, folder: Path) -> None:
    patched_tree.apply(tree, folder=folder)
    before = contents(folder)
    assert not refresh("2.patch", tree, pristine=PRISTINE.get, folder=folder, today=TODAY)
    assert contents(folder) == before


def test_refresh_refuses_a_file_that_a_later_patch_owns(tree: Path, folder: Path) -> None:
    patched_tree.apply(tree, folder=folder)
    with pytest.raises(PatchError, match=r"2\.patch comes after 1\.patch and touches verl/a\.py too"):
        refresh("1.patch", tree, pristine=PRISTINE.get, folder=folder)


def test_refresh_makes_a_new_patch_of_a_header(tree: Path, folder: Path) -> None:
    patched_tree.apply(tree, folder=folder)
    write(folder, {"3.patch": HEADER, "series": b"1.patch\n2.patch\n3.patch\n"})
    with pytest.raises(PatchError, match=r"3\.patch names no file yet"):
        refresh("3.patch", tree, pristine=PRISTINE.get, folder=folder)
    with pytest.raises(PatchError, match="its diff would be empty"):
        refresh("3.patch", tree, pristine=PRISTINE.get, folder=folder, add=["verl/b.py"])
    write(tree, {"verl/b.py": b"X\ny\n"})
    assert refresh("3.patch", tree, pristine=PRISTINE.get, folder=folder, add=["verl/b.py"])
    assert patched_tree.patch_state(tree, folder=folder).overall == "applied"


def test_refresh_of_an_unlisted_patch_names_the_listed(tree: Path, folder: Path) -> None:
    with pytest.raises(PatchError, match=r"9\.patch is not in .*lists 1\.patch, 2\.patch"):
        refresh("9.patch", tree, pristine=PRISTINE.get, folder=folder)


def test_every_real_patch_is_what_refresh_would_write(published_verl: Path, tmp_path: Path) -> None:
    folder, root = patches_dir(), published_verl
    published = contents(root)
    patched_tree.apply(root, folder=folder)
    copy = tmp_path / "patches"
    write(copy, {name: (folder / name).read_bytes() for name in ("series", *series.series_names(folder))})
    for name in series.series_names(copy):
        assert not refresh(name, root, pristine=published.get, folder=copy), name
