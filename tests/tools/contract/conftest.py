# SPDX-License-Identifier: Apache-2.0
"""Fixtures: a small verl and a small package on it, and the pinned verl."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from recipe.async_pipeline.errors import PatchError
from recipe.async_pipeline.installed.verl import patches_dir
from recipe.async_pipeline.tools.contract.sources import OURS, THEIRS, Sources
from recipe.async_pipeline.tools.patches import verl_source

MakeSources = Callable[[Mapping[str, str]], Sources]


@pytest.fixture
def sources_of(tmp_path: Path) -> MakeSources:
    """Return a function that writes files below `verl/` and `pkg/` and returns both packages."""

    def make(files: Mapping[str, str]) -> Sources:
        for path, text in {"verl/__init__.py": "", "pkg/__init__.py": "", **files}.items():
            file = tmp_path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        return Sources(roots={THEIRS: tmp_path / "verl", OURS: tmp_path / "pkg"})

    return make


@pytest.fixture(scope="session")
def pinned() -> Path:
    """The root of the pinned verl."""
    try:
        root = verl_source.default_verl_root(patches_dir())
        verl_source.check_version(root, verl_source.read_pin(patches_dir()))
    except PatchError as error:
        pytest.skip(f"reads the pinned verl: {error}")
    return root
