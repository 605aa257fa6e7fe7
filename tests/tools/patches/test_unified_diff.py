# SPDX-License-Identifier: Apache-2.0
"""Diffs round-trip and apply strictly in both directions; everything unsupported is refused by name."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from recipe.async_pipeline.errors import PatchError
from recipe.async_pipeline.installed.verl import NULL_ID, blob_id
from recipe.async_pipeline.tools.patches.unified_diff import format_diff, parse_diffs

LINES = st.lists(
    st.sampled_from([b"a\n", b"b\n", b"\n", b"-\n", b"+++\n", b"@@ x\n", b"\xff\r\n"]), max_size=30
)


@pytest.mark.slow
@settings(max_examples=20)
@given(old=LINES, new=LINES)
def test_a_written_diff_reads_back_and_applies_both_ways(old: list[bytes], new: list[bytes]) -> None:
    before, after = b"".join(old), b"".join(new)
    assume(before != after)
    (diff,) = parse_diffs(format_diff("verl/x.py", before, after), source="p")
    assert diff.apply(before) == after
    assert diff.revert(after) == before


@settings(max_examples=20)
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


def test_a_folder_of_another_repository_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """git would do nothing there, and report success."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (diff,) = parse_diffs(format_diff("x.py", b"a\nb\n", b"a\nB\n"), source="p")
    assert diff.apply(b"a\nb\n") == b"a\nB\n"


def test_without_git_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    (diff,) = parse_diffs(format_diff("x.py", b"a\n", b"b\n"), source="p")
    with pytest.raises(PatchError, match="install git"):
        diff.apply(b"a\n")


def test_an_unexpected_file_is_refused_with_both_ids() -> None:
    (diff,) = parse_diffs(format_diff("verl/x.py", b"a\n", b"b\n"), source="p")
    with pytest.raises(PatchError, match=rf"{blob_id(b'c')}.*before.*{diff.old_id}"):
        diff.apply(b"c")
    with pytest.raises(PatchError, match="before reverting"):
        diff.revert(b"a\n")


def test_a_hunk_that_does_not_match_is_refused_with_the_words_of_git() -> None:
    text = format_diff("verl/x.py", b"a\nb\n", b"a\nB\n")
    (diff,) = parse_diffs(text.replace(b"-b\n", b"-c\n"), source="p")
    with pytest.raises(PatchError, match=r"verl/x\.py: .*does not apply"):
        diff.apply(b"a\nb\n")


GOOD = format_diff("verl/x.py", b"a\nb\n", b"a\nB\n")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (GOOD.replace(b"b/verl/x.py\nindex", b"b/verl/y.py\nindex"), "renaming"),
        (GOOD.replace(b"verl/x.py", b"../x.py"), "leaves the tree"),
        (GOOD.replace(b"index ", b"index 12345..6789a "), "full blob ids"),
        (GOOD.replace(blob_id(b"a\nB\n").encode(), NULL_ID.encode()), "deleted"),
    ],
)
def test_unsupported_diffs_are_refused(text: bytes, complaint: str) -> None:
    with pytest.raises(PatchError, match=f"some.patch.*{complaint}"):
        parse_diffs(text, source="some.patch")


def test_a_file_without_its_last_newline_is_refused() -> None:
    with pytest.raises(PatchError, match="no newline"):
        format_diff("verl/x.py", b"a\n", b"b")
