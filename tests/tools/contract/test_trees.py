# SPDX-License-Identifier: Apache-2.0
"""How a series fits a tree that is pristine, patched, edited, or has the fix already."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipe.async_pipeline.errors import PatchError
from recipe.async_pipeline.tools.contract import trees
from recipe.async_pipeline.tools.patches.series import Patch, PatchSeries
from recipe.async_pipeline.tools.patches.unified_diff import format_diff, parse_diffs

BEFORE = b"".join(b"line %d\n" % number for number in range(20))
AFTER = BEFORE.replace(b"line 9\n", b"nine\n")


def series_of(before: bytes | None = BEFORE, after: bytes = AFTER) -> PatchSeries:
    diffs = parse_diffs(format_diff("verl/a.py", before, after), source="1.patch")
    return PatchSeries(patches=(Patch(name="1.patch", header={}, head=b"", files=diffs),))


@pytest.mark.parametrize(
    ("content", "state", "expected"),
    [
        (BEFORE, "fits", AFTER),
        (AFTER, "applied", AFTER),
        (b"new\n" + BEFORE, "moved", b"new\n" + AFTER),
        (b"new\n" + AFTER, "upstream", b"new\n" + AFTER),
        (BEFORE.replace(b"line 9", b"other"), "broken", BEFORE.replace(b"line 9", b"other")),
    ],
)
def test_a_patch_fits_or_says_why_not(tmp_path: Path, content: bytes, state: str, expected: bytes) -> None:
    file = tmp_path / "verl/a.py"
    file.parent.mkdir()
    file.write_bytes(content)
    contents, fits = trees.patched(tmp_path, series_of())
    assert contents == {file: expected} and [fit.state for fit in fits] == [state]
    assert file.read_bytes() == content, "the tree is only read"


def test_a_missing_file_and_a_new_one(tmp_path: Path) -> None:
    assert [fit.state for fit in trees.patched(tmp_path, series_of())[1]] == ["broken"]
    contents, fits = trees.patched(tmp_path, series_of(before=None))
    assert [fit.state for fit in fits] == ["fits"] and contents == {tmp_path / "verl/a.py": AFTER}


def test_every_state_has_words() -> None:
    assert set(trees.STATES) == set(trees.TreeFit.__args__)  # type: ignore[attr-defined]


def test_a_folder_without_verl_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PatchError, match="give the folder that contains verl/"):
        trees.sources_of(tmp_path, {})


def test_a_file_that_a_patch_creates_is_part_of_the_tree(tmp_path: Path) -> None:
    (tmp_path / "verl").mkdir()
    (tmp_path / "verl/__init__.py").touch()
    contents, _ = trees.patched(tmp_path, series_of(before=None, after=b"def made(): ...\n"))
    assert trees.sources_of(tmp_path, contents).find("verl.a", "made") is not None
