# SPDX-License-Identifier: Apache-2.0
"""The series: reading patches and headers, and the chain of blob ids."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipe.async_pipeline.errors import PatchError
from recipe.async_pipeline.tools.patches import patched_tree, series
from tests.fakes.patch_folder import write


def test_a_series_that_does_not_chain_is_refused(tree: Path, folder: Path) -> None:
    write(folder, {"series": b"2.patch\n1.patch\n"})
    with pytest.raises(PatchError, match=r"1\.patch expects verl/a\.py"):
        patched_tree.patch_state(tree, folder=folder)


def test_a_listed_patch_that_is_missing_is_named(tree: Path, folder: Path) -> None:
    (folder / "2.patch").unlink()
    with pytest.raises(PatchError, match=r"2\.patch is in the series"):
        patched_tree.apply(tree, folder=folder)


def test_header_continues_on_indented_lines() -> None:
    assert series.parse_header("Why: first\n second\nTest: a::b\n") == {
        "Why": "first second",
        "Test": "a::b",
    }
