# SPDX-License-Identifier: Apache-2.0
"""The keys that code names, and the keys that a tree has."""

from __future__ import annotations

from pathlib import Path

from recipe.async_pipeline.contract import config_keys

from .conftest import MakeSources


def test_keys_are_named_in_strings_and_as_attributes(sources_of: MakeSources) -> None:
    text = 'KEY = "data.seed"\nconfig.trainer.v1.get("x")\nself.config.a.b = other.c.d\n'
    found = set(config_keys.named_keys(sources_of({"pkg/sub/a.py": text})))
    assert found == {
        ("data.seed", "sub/a.py"),
        ("trainer.v1.get", "sub/a.py"),
        ("trainer.v1", "sub/a.py"),
        ("a.b", "sub/a.py"),
    }


def test_a_tree_has_the_keys_of_all_its_composed_configs(tmp_path: Path) -> None:
    folder = tmp_path / config_keys.FOLDER
    folder.mkdir(parents=True)
    assert config_keys.keys_of_tree(tmp_path) == {}
    (folder / config_keys.COMPOSED[0]).write_text("a:\n  b: 1\n  n: null\n")
    (folder / config_keys.COMPOSED[1]).write_text("a:\n  c: {d: 2}\n")
    first, second = config_keys.keys_of_tree(tmp_path).values()
    assert all(config_keys.has(first, path) for path in ("a", "a.b", "a.n"))
    assert config_keys.has(second, "a.c.d")
    assert not any(config_keys.has(first, path) for path in ("b", "a.c", "a.b.c"))
