# SPDX-License-Identifier: Apache-2.0
"""Diffs round-trip and apply strictly in both directions; everything unsupported is refused by name."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.async_pipeline.errors import PatchError
from recipe.async_pipeline.patching.unified_diff import NULL_ID, blob_id, format_diff, parse_diffs

LINES = st.lists(
    st.sampled_from([b"a\n", b"b\n", b"\n", b"-\n", b"+++\n", b"@@ x\n", b"\xff\r\n"]), max_size=30
)


@given(old=LINES, new=LINES)
def test_a_written_diff_reads_back_and_applies_both_ways(old: list[bytes], new: list[bytes]) -> None:
    before, after = b"".join(old), b"".join(new)
    (diff,) = parse_diffs(format_diff("verl/x.py", before, after), source="p")
    assert diff.apply(before) == after
    assert diff.revert(after) == before


@given(new=LINES.filter(bool))
def test_a_new_file_is_created_from_empty(new: list[bytes]) -> None:
    content = b"".join(new)
    (diff,) = parse_diffs(format_diff("verl/x.py", None, content), source="p")
    assert diff.creates and diff.old_id == NULL_ID
    assert diff.apply(b"") == content
    assert diff.revert(content) == b""


def test_blob_id_is_gits(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"some\ntext\n")
    git = subprocess.run(
        ["git", "hash-object", "f"], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert blob_id(b"some\ntext\n") == git.stdout.strip()


def test_git_reads_what_we_write(tmp_path: Path) -> None:
    old, new = b"a\nb\nc\n", b"a\nB\nc\nd\n"
    (tmp_path / "x.py").write_bytes(old)
    patch = format_diff("x.py", old, new) + format_diff("new.py", None, b"n\n")
    # GIT_CEILING_DIRECTORIES: in a folder of another repository git would do nothing and report success.
    environment = {"GIT_CEILING_DIRECTORIES": str(tmp_path.parent), "PATH": "/usr/bin:/bin:/usr/local/bin"}
    subprocess.run(["git", "apply"], input=patch, cwd=tmp_path, env=environment, check=True)
    assert (tmp_path / "x.py").read_bytes() == new
    assert (tmp_path / "new.py").read_bytes() == b"n\n"


def test_an_unexpected_file_is_refused_with_both_ids() -> None:
    (diff,) = parse_diffs(format_diff("verl/x.py", b"a\n", b"b\n"), source="p")
    with pytest.raises(PatchError, match=rf"{blob_id(b'c')}.*before.*{diff.old_id}"):
        diff.apply(b"c")
    with pytest.raises(PatchError, match="before reverting"):
        diff.revert(b"a\n")


def test_a_hunk_never_moves() -> None:
    text = format_diff("verl/x.py", b"a\nb\n", b"a\nB\n")
    shifted = text.replace(b"@@ -1,2 +1,2 @@", b"@@ -2,2 +2,2 @@")
    (diff,) = parse_diffs(shifted, source="p")
    with pytest.raises(PatchError, match="hunk at line 2 does not match"):
        diff.apply(b"a\nb\n")


GOOD = format_diff("verl/x.py", b"a\nb\n", b"a\nB\n")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (GOOD.replace(b"b/verl/x.py\nindex", b"b/verl/y.py\nindex"), "renaming"),
        (GOOD.replace(b"verl/x.py", b"../x.py"), "leaves the tree"),
        (GOOD.replace(b"index ", b"index 12345..6789a "), "full blob ids"),
        (GOOD.replace(blob_id(b"a\nB\n").encode(), NULL_ID.encode()), "deleted"),
        (GOOD.replace(b"-1,2", b"-1,3"), "announces"),
        (GOOD + b"?\n", "unreadable line"),
        (GOOD + b"\\ No newline at end of file\n", "without a newline"),
        (GOOD.replace(b"@@ -", b"@ -"), "expected a hunk"),
    ],
)
def test_unsupported_diffs_are_refused(text: bytes, complaint: str) -> None:
    with pytest.raises(PatchError, match=f"some.patch.*{complaint}"):
        parse_diffs(text, source="some.patch")


def test_a_file_without_its_last_newline_is_refused() -> None:
    with pytest.raises(PatchError, match="no newline"):
        format_diff("verl/x.py", b"a\n", b"b")
