# SPDX-License-Identifier: Apache-2.0
"""Fixtures: a pristine tree, and a folder of patches for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipe.async_pipeline.tools.patches.unified_diff import format_diff
from tests.fakes.patch_folder import FIRST, HEADER, PRISTINE, SECOND, write
from tests.fakes.published_verl import unpacked


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


@pytest.fixture
def published_verl(tmp_path: Path) -> Path:
    """verl as it was published, unpacked."""
    return unpacked(tmp_path)
