# SPDX-License-Identifier: Apache-2.0
"""Every patch says what it is for, is in the series, and names a test that exists."""

from __future__ import annotations

import ast
import datetime

import pytest

from recipe.async_pipeline.patching import series
from tests import REPOSITORY

FOLDER = REPOSITORY / "patches"
SERIES = series.load_series(FOLDER)


def test_the_folder_is_found_from_the_code() -> None:
    assert series.patches_dir() == FOLDER


def test_series_lists_exactly_the_patches_there_are() -> None:
    assert sorted(series.series_names(FOLDER)) == sorted(file.name for file in FOLDER.glob("*.patch"))


@pytest.mark.parametrize("patch", SERIES.patches, ids=lambda patch: patch.name)
def test_header_is_complete(patch: series.Patch) -> None:
    assert tuple(patch.header) == series.HEADER_FIELDS
    assert all(patch.header.values())
    datetime.date.fromisoformat(patch.header["Last-Update"])
    assert patch.files, "a patch without a diff"


@pytest.mark.parametrize("patch", SERIES.patches, ids=lambda patch: patch.name)
def test_named_test_exists(patch: series.Patch) -> None:
    file, _, name = patch.header["Test"].partition("::")
    tree = ast.parse((REPOSITORY / file).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
