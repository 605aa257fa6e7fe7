# SPDX-License-Identifier: Apache-2.0
"""Every patch has a complete header, is in the series, names a test, and uses the front door only."""

from __future__ import annotations

import ast
import datetime
import re

import pytest

import recipe.async_pipeline
from recipe.async_pipeline.installed.verl import FILE, patches_dir
from recipe.async_pipeline.tools.patches import series
from tests import REPOSITORY

FOLDER = REPOSITORY / "patches"
SERIES = series.load_series(FOLDER)


def test_the_folder_is_found_from_the_code() -> None:
    assert patches_dir() == FOLDER


def test_the_recorded_ids_are_the_ones_of_the_series() -> None:
    remedy = "run `bash run_scripts/fix.sh`"
    assert (FOLDER / FILE).read_text(encoding="utf-8") == series.recorded_ids(FOLDER), remedy


def test_series_lists_exactly_the_patches_there_are() -> None:
    assert sorted(series.series_names(FOLDER)) == sorted(file.name for file in FOLDER.glob("*.patch"))


@pytest.mark.parametrize("patch", SERIES.patches, ids=lambda patch: patch.name)
def test_header_is_complete(patch: series.Patch) -> None:
    assert tuple(patch.header) == series.HEADER_FIELDS
    assert all(patch.header.values())
    datetime.date.fromisoformat(patch.header["Last-Update"])
    assert patch.files, "a patch without a diff"


@pytest.mark.parametrize("patch", SERIES.patches, ids=lambda patch: patch.name)
def test_header_names_what_a_run_lacks_without_it(patch: series.Patch) -> None:
    assert patch.without and all(len(limit) < 110 and not limit.endswith(".") for limit in patch.without)


@pytest.mark.parametrize("patch", SERIES.patches, ids=lambda patch: patch.name)
def test_named_test_exists(patch: series.Patch) -> None:
    file, _, name = patch.header["Test"].partition("::")
    tree = ast.parse((REPOSITORY / file).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


FRONT_DOOR = {"recipe.async_pipeline.verl_bridge": {"hooks"}}
"""What a patch may import of this package, in addition to its public names."""


@pytest.mark.parametrize("patch", SERIES.patches, ids=lambda patch: patch.name)
def test_patches_import_only_the_front_door(patch: series.Patch) -> None:
    text = (FOLDER / patch.name).read_text(encoding="utf-8")
    added = "\n".join(line[1:] for line in text.splitlines() if line.startswith("+"))
    for module, names in re.findall(r"from (recipe[\w.]*) import (\([^)]*\)|.*)", added):
        allowed = FRONT_DOOR.get(module, set())
        if module == "recipe.async_pipeline":
            allowed = set(recipe.async_pipeline.__all__)
        assert set(re.findall(r"\w+", names)) <= allowed, f"{patch.name} imports {names} from {module}"
    assert not re.search(r"^\s*import recipe", added, re.MULTILINE)
