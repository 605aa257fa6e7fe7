# SPDX-License-Identifier: Apache-2.0
"""The keys that code names."""

from __future__ import annotations

from recipe.async_pipeline.tools.contract import config_keys

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
