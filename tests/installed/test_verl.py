# SPDX-License-Identifier: Apache-2.0
"""Where verl is, its version and its keys, without an import of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from recipe.async_pipeline.errors import PatchError
from recipe.async_pipeline.installed.verl import (
    COMPOSED,
    FOLDER,
    find_verl_root,
    has,
    keys_of_tree,
    version_in,
)


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
