# SPDX-License-Identifier: Apache-2.0
"""A run tells from the ids of files whether its verl is the pinned one, and patched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipe.async_pipeline.errors import PatchedVerlRequired, PatchError
from recipe.async_pipeline.installed import patch_state
from recipe.async_pipeline.installed.patch_state import (
    NULL_ID,
    FileIds,
    blob_id,
    require_known,
    require_patched,
)
from recipe.async_pipeline.installed.verl import find_verl_root
from tests.fakes.patch_folder import APPLIED, PRISTINE, write

IDS = {
    path: FileIds(blob_id(PRISTINE[path]) if path in PRISTINE else NULL_ID, blob_id(content))
    for path, content in APPLIED.items()
    if PRISTINE.get(path) != content
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    write(tmp_path / "tree", PRISTINE)
    return tmp_path / "tree"


def test_require_patched_names_file_state_and_remedy(tree: Path) -> None:
    with pytest.raises(
        PatchedVerlRequired, match=r"verl/a\.py is pristine; run `async-pipeline patch apply`"
    ):
        require_patched(tree, IDS)
    write(tree, APPLIED)
    require_patched(tree, IDS)


def test_require_known_refuses_a_diverged_tree_only(tree: Path) -> None:
    require_known(tree, IDS)
    write(tree, APPLIED)
    require_known(tree, IDS)
    (tree / "verl/a.py").write_text("mine\n")
    with pytest.raises(PatchedVerlRequired, match=r"verl/a\.py is diverged; restore the published file"):
        require_known(tree, IDS)


def test_the_ids_of_the_trees_version_count_and_else_the_pinned_ones(tree: Path, tmp_path: Path) -> None:
    first, other = FileIds("1", "2"), FileIds("3", "4")
    versions = {"1.0": {"verl/a.py": first._asdict()}, "2.0": {"verl/a.py": other._asdict()}}
    (tmp_path / patch_state.FILE).write_text(json.dumps(versions))
    assert patch_state.ids_for(tree, tmp_path) == {"verl/a.py": first}, "no version file"
    for version, ids in (("2.0", other), ("3.0", first)):
        write(tree, {"verl/version/version": f"{version}\n".encode()})
        assert patch_state.ids_for(tree, tmp_path) == {"verl/a.py": ids}


@pytest.mark.parametrize("text", [None, "{", "[]", "{}", '{"1.0": {"verl/a.py": {}}}'])
def test_a_damaged_record_is_refused(tree: Path, tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / patch_state.FILE).write_text(text)
    with pytest.raises(PatchError, match="is not a record of patched files"):
        patch_state.ids_for(tree, tmp_path)


def test_the_installed_verl_is_known() -> None:
    require_known(find_verl_root())
