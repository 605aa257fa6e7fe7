# SPDX-License-Identifier: Apache-2.0
"""The hash of a file is known when it is written, without reading it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from recipe.async_pipeline.checkpoint import hashed_file
from recipe.async_pipeline.checkpoint.hashed_file import WrittenFiles, entry_of


@pytest.mark.parametrize("piece", [1, 3, 1 << 20])
def test_the_hash_is_that_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(hashed_file, "PIECE_BYTES", piece)
    (tmp_path / "actor").mkdir()
    files = WrittenFiles(tmp_path)
    with files.create(tmp_path / "actor" / "x") as file:
        assert [file.write(data) for data in (b"abc", b"", memoryview(b"defg"))] == [3, 0, 4]
        assert files.entries == {}, "it is not complete"
    assert (tmp_path / "actor" / "x").read_bytes() == b"abcdefg"
    counted: list[int] = []
    read = entry_of(tmp_path, tmp_path / "actor" / "x", count=counted.append)
    assert files.entries == {"actor/x": read}
    assert (read.nbytes, sum(counted)) == (7, 7)


def test_a_file_is_on_disk_before_it_counts_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = WrittenFiles(tmp_path)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"), files.create(tmp_path / "x") as file:
        file.write(b"a")
    assert files.entries == {}
