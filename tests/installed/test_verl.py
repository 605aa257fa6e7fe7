# SPDX-License-Identifier: Apache-2.0
"""Where verl is, its version and its keys, without an import of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from recipe.async_pipeline.errors import PatchedVerlRequired, PatchError
from recipe.async_pipeline.installed import verl as installed_verl
from recipe.async_pipeline.installed.verl import (
    COMPOSED,
    FOLDER,
    NULL_ID,
    FileIds,
    blob_id,
    find_verl_root,
    has,
    keys_of_tree,
    require_known,
    require_patched,
    version_in,
)
from tests.fakes.patch_folder import APPLIED, PRISTINE, write


def test_a_tree_has_the_keys_of_all_its_composed_configs(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    folder.mkdir(parents=True)
    assert keys_of_tree(tmp_path) == {}
    (folder / COMPOSED[0]).write_text("a:\n  b: 1\n  n: null\n")
    (folder / COMPOSED[1]).write_text("a:\n  c: {d: 2}\n")
    first, second = keys_of_tree(tmp_path).values()
    assert all(has(first, path) for path in ("a", "a.b", "a.n"))
    assert has(second, "a.c.d")
    assert not any(has(first, path) for path in ("b", "a.c", "a.b.c"))


def test_a_tree_has_a_version_or_none(tmp_path: Path) -> None:
    assert version_in(tmp_path) is None
    assert version_in(find_verl_root()) == (find_verl_root() / "verl/version/version").read_text().strip()


def test_find_verl_root_does_not_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "verl", raising=False)
    (tmp_path / "verl").mkdir()
    (tmp_path / "verl" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_verl_root() == tmp_path
    assert "verl" not in sys.modules


def test_find_verl_root_without_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PatchError, match="setup.sh"):
        find_verl_root()


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
    (tmp_path / installed_verl.FILE).write_text(json.dumps(versions))
    assert installed_verl.ids_for(tree, tmp_path) == {"verl/a.py": first}, "no version file"
    for version, ids in (("2.0", other), ("3.0", first)):
        write(tree, {"verl/version/version": f"{version}\n".encode()})
        assert installed_verl.ids_for(tree, tmp_path) == {"verl/a.py": ids}


@pytest.mark.parametrize("text", [None, "{", "[]", "{}", '{"1.0": {"verl/a.py": {}}}'])
def test_a_damaged_record_is_refused(tree: Path, tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / installed_verl.FILE).write_text(text)
    with pytest.raises(PatchError, match="is not a record of patched files"):
        installed_verl.ids_for(tree, tmp_path)


def test_the_installed_verl_is_known() -> None:
    require_known(find_verl_root())
