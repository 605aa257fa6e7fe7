# SPDX-License-Identifier: Apache-2.0
"""State, apply, revert and refresh: on a tree of three small files, then on the published verl."""

from __future__ import annotations

import datetime
import time
from pathlib import Path

import pytest

from recipe.async_pipeline.errors import PatchedVerlRequired, PatchError
from recipe.async_pipeline.patching import series, verl_source
from recipe.async_pipeline.patching.unified_diff import format_diff

PRISTINE = {"verl/a.py": b"one\ntwo\nthree\n", "verl/b.py": b"x\ny\n"}
FIRST = {"verl/a.py": b"one\nTWO\nthree\n"}
SECOND = {"verl/a.py": b"one\nTWO\nthree\nfour\n", "verl/new.py": b"new\n"}
APPLIED = {**PRISTINE, **FIRST, **SECOND}
HEADER = b"Subject: s\nWhy: w\nLast-Update: 2000-01-01\n\n"
TODAY = datetime.date(2026, 11, 21)


def contents(root: Path) -> dict[str, bytes]:
    """Every file of the tree but our record of the series."""
    files = (file for file in root.rglob("*") if file.is_file() and series.RECORD not in file.parts)
    return {file.relative_to(root).as_posix(): file.read_bytes() for file in files}


def write(root: Path, files: dict[str, bytes]) -> None:
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two patches; the second builds on the first and creates a file."""
    folder = tmp_path / "patches"
    base = dict(PRISTINE)
    for name, edits in (("1.patch", FIRST), ("2.patch", SECOND)):
        diffs = b"".join(format_diff(path, base.get(path), content) for path, content in edits.items())
        write(folder, {name: HEADER + diffs})
        base.update(edits)
    write(folder, {"series": b"# a comment\n1.patch\n2.patch  # and another\n"})
    return folder


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    write(root, PRISTINE)
    write(root, {"verl/__init__.py": b""})
    return root


def expected(files: dict[str, bytes]) -> dict[str, bytes]:
    return {**files, "verl/__init__.py": b""}


def test_apply_then_revert_restores_byte_for_byte(tree: Path, folder: Path) -> None:
    assert series.patch_state(tree, folder=folder).overall == "pristine"
    assert series.apply(tree, folder=folder) == ("verl/a.py", "verl/new.py")
    assert contents(tree) == expected(APPLIED)
    assert series.patch_state(tree, folder=folder).overall == "applied"
    assert series.revert(tree, folder=folder) == ("verl/a.py", "verl/new.py")
    assert contents(tree) == expected(PRISTINE)
    assert not (tree / series.RECORD).exists()


@pytest.mark.parametrize("action", [series.apply, series.revert])
def test_a_second_time_does_nothing(tree: Path, folder: Path, action: object) -> None:
    assert callable(action)
    action(tree, folder=folder)
    before = {file: file.stat().st_mtime_ns for file in tree.rglob("*.py")}
    assert action(tree, folder=folder) == ()
    assert {file: file.stat().st_mtime_ns for file in tree.rglob("*.py")} == before


@pytest.mark.parametrize("action", [series.apply, series.revert])
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
    states = {file.path: file.state for file in series.patch_state(tree, folder=folder).files}
    assert states[edited] == "diverged"


def test_a_half_applied_tree_is_completed(tree: Path, folder: Path) -> None:
    write(tree, {"verl/new.py": APPLIED["verl/new.py"]})
    assert series.patch_state(tree, folder=folder).overall == "diverged"
    assert series.apply(tree, folder=folder) == ("verl/a.py",)
    assert contents(tree) == expected(APPLIED)


def test_a_failing_swap_leaves_no_file_half_written(
    tree: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(source: object, target: object) -> None:
        raise OSError("disk")

    monkeypatch.setattr(series.os, "replace", fail)
    with pytest.raises(OSError, match="disk"):
        series.apply(tree, folder=folder)
    assert contents(tree) == expected(PRISTINE)


def test_a_tree_of_an_older_series_is_brought_up_to_date(tree: Path, folder: Path) -> None:
    series.apply(tree, folder=folder)
    (folder / "2.patch").unlink()
    newer = {"verl/a.py": b"one\nzwei\nthree\n"}
    write(
        folder,
        {
            "series": b"1.patch\n",
            "1.patch": HEADER + format_diff("verl/a.py", PRISTINE["verl/a.py"], newer["verl/a.py"]),
        },
    )
    assert series.patch_state(tree, folder=folder).overall == "diverged"
    assert series.apply(tree, folder=folder) == ("verl/a.py", "verl/new.py")
    assert contents(tree) == expected({**PRISTINE, **newer})
    series.revert(tree, folder=folder)
    assert contents(tree) == expected(PRISTINE)


def test_require_patched_names_file_state_and_remedy(tree: Path, folder: Path) -> None:
    with pytest.raises(
        PatchedVerlRequired, match=r"verl/a\.py is pristine; run `async-pipeline patch apply`"
    ):
        series.require_patched(tree, folder=folder)
    series.apply(tree, folder=folder)
    series.require_patched(tree, folder=folder)


def test_a_series_that_does_not_chain_is_refused(tree: Path, folder: Path) -> None:
    write(folder, {"series": b"2.patch\n1.patch\n"})
    with pytest.raises(PatchError, match=r"1\.patch expects verl/a\.py"):
        series.patch_state(tree, folder=folder)


def test_a_listed_patch_that_is_missing_is_named(tree: Path, folder: Path) -> None:
    (folder / "2.patch").unlink()
    with pytest.raises(PatchError, match=r"2\.patch is in the series"):
        series.apply(tree, folder=folder)


def test_refresh_takes_the_edit_and_keeps_the_header(tree: Path, folder: Path) -> None:
    series.apply(tree, folder=folder)
    write(tree, {"verl/a.py": b"zero\none\nTWO\nthree\nfour\n"})
    assert series.refresh("2.patch", tree, pristine=PRISTINE.get, folder=folder, today=TODAY)
    text = (folder / "2.patch").read_bytes()
    assert text.startswith(b"Subject: s\nWhy: w\nLast-Update: 2026-11-21\n\ndiff --git a/verl/a.py")
    assert series.patch_state(tree, folder=folder).overall == "applied"
    series.revert(tree, folder=folder)
    assert contents(tree) == expected(PRISTINE)


def test_refresh_without_an_edit_changes_nothing(tree: Path, folder: Path) -> None:
    series.apply(tree, folder=folder)
    before = contents(folder)
    assert not series.refresh("2.patch", tree, pristine=PRISTINE.get, folder=folder, today=TODAY)
    assert contents(folder) == before


def test_refresh_refuses_a_file_that_a_later_patch_owns(tree: Path, folder: Path) -> None:
    series.apply(tree, folder=folder)
    with pytest.raises(PatchError, match=r"2\.patch comes after 1\.patch and touches verl/a\.py too"):
        series.refresh("1.patch", tree, pristine=PRISTINE.get, folder=folder)


def test_refresh_makes_a_new_patch_of_a_header(tree: Path, folder: Path) -> None:
    series.apply(tree, folder=folder)
    write(folder, {"3.patch": HEADER, "series": b"1.patch\n2.patch\n3.patch\n"})
    with pytest.raises(PatchError, match=r"3\.patch names no file yet"):
        series.refresh("3.patch", tree, pristine=PRISTINE.get, folder=folder)
    with pytest.raises(PatchError, match="nothing of it would be left"):
        series.refresh("3.patch", tree, pristine=PRISTINE.get, folder=folder, add=["verl/b.py"])
    write(tree, {"verl/b.py": b"X\ny\n"})
    assert series.refresh("3.patch", tree, pristine=PRISTINE.get, folder=folder, add=["verl/b.py"])
    assert series.patch_state(tree, folder=folder).overall == "applied"


def test_refresh_of_an_unlisted_patch_names_the_listed(tree: Path, folder: Path) -> None:
    with pytest.raises(PatchError, match=r"9\.patch is not in .*lists 1\.patch, 2\.patch"):
        series.refresh("9.patch", tree, pristine=PRISTINE.get, folder=folder)


def test_header_continues_on_indented_lines() -> None:
    assert series.parse_header("Why: first\n second\nTest: a::b\n") == {
        "Why": "first second",
        "Test": "a::b",
    }


def test_the_real_series_on_the_published_verl(tmp_path: Path) -> None:
    folder = series.patches_dir()
    pin = verl_source.read_pin(folder)
    verl_source.unpack(verl_source.fetch_sdist(folder), tmp_path, top=pin.stem)
    root = tmp_path / pin.stem
    published = contents(root)
    series.apply(root, folder=folder)
    started = time.perf_counter()
    state = series.patch_state(root, folder=folder)
    elapsed_s = time.perf_counter() - started
    assert state.overall == "applied" and len(state.files) >= 7
    assert elapsed_s < 0.25, "every trainer asks this at its start"
    assert contents(root).keys() - published.keys() == {"verl/trainer/ppo/pipeline.py"}
    series.revert(root, folder=folder)
    assert contents(root) == published


def test_every_real_patch_is_what_refresh_would_write(tmp_path: Path) -> None:
    folder = series.patches_dir()
    pin = verl_source.read_pin(folder)
    verl_source.unpack(verl_source.fetch_sdist(folder), tmp_path, top=pin.stem)
    root = tmp_path / pin.stem
    published = contents(root)
    series.apply(root, folder=folder)
    copy = tmp_path / "patches"
    write(copy, {name: (folder / name).read_bytes() for name in ("series", *series.series_names(folder))})
    for name in series.series_names(copy):
        assert not series.refresh(name, root, pristine=published.get, folder=copy), name
