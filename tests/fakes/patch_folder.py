# SPDX-License-Identifier: Apache-2.0
"""A tree of small files and a folder of two patches for it."""

from __future__ import annotations

from pathlib import Path

from recipe.async_pipeline.tools.patches import patched_tree

PRISTINE = {"verl/a.py": b"one\ntwo\nthree\n", "verl/b.py": b"x\ny\n"}
FIRST = {"verl/a.py": b"one\nTWO\nthree\n"}
SECOND = {"verl/a.py": b"one\nTWO\nthree\nfour\n", "verl/new.py": b"new\n"}
APPLIED = {**PRISTINE, **FIRST, **SECOND}
HEADER = b"Subject: s\nWhy: w\nLast-Update: 2000-01-01\n\n"


def contents(root: Path) -> dict[str, bytes]:
    """Return every file of the tree except the record of the series."""
    files = (file for file in root.rglob("*") if file.is_file() and patched_tree.RECORD not in file.parts)
    return {file.relative_to(root).as_posix(): file.read_bytes() for file in files}


def write(root: Path, files: dict[str, bytes]) -> None:
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)


def expected(files: dict[str, bytes]) -> dict[str, bytes]:
    return {**files, "verl/__init__.py": b""}
