# SPDX-License-Identifier: Apache-2.0
"""An action runs when the import of its module ends, before importers take names from it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

from recipe.async_pipeline.verl_bridge.process import after_import as module
from recipe.async_pipeline.verl_bridge.process.after_import import after_import


@pytest.fixture
def late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path with the modules `late_part`, and `late_user` which takes a name from it."""
    (tmp_path / "late_part.py").write_text("value = 1\n")
    (tmp_path / "late_user.py").write_text("from late_part import value\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(module, "_FINDER", module.LateActions())
    before = list(sys.meta_path)
    yield tmp_path
    sys.meta_path[:] = before
    for name in ("late_part", "late_user"):
        sys.modules.pop(name, None)


def double(part: ModuleType) -> None:
    vars(part)["value"] *= 2


def test_importers_get_what_the_action_leaves(late: Path) -> None:
    after_import("late_part", double)
    assert "late_part" not in sys.modules
    assert importlib.import_module("late_user").value == 2
    assert sys.modules["late_part"].value == 2, "once"


def test_a_module_that_is_there_is_acted_on_at_once(late: Path) -> None:
    part = importlib.import_module("late_part")
    after_import("late_part", double)
    assert part.value == 2


def test_the_same_action_is_called_once(late: Path) -> None:
    after_import("late_part", double)
    after_import("late_part", double)
    assert importlib.import_module("late_part").value == 2
    after_import("late_part", double)
    assert sys.modules["late_part"].value == 2


def test_several_actions_run_in_their_order(late: Path) -> None:
    after_import("late_part", double)
    after_import("late_part", lambda part: vars(part).update(value=part.value + 1))
    assert importlib.import_module("late_part").value == 3


def test_the_loader_is_the_usual_one(late: Path) -> None:
    after_import("late_part", double)
    part = importlib.import_module("late_part")
    assert isinstance(part.__loader__, SourceFileLoader)
    assert part.__file__ == str(late / "late_part.py")


def test_a_module_that_does_not_exist_is_reported_as_usual(late: Path) -> None:
    after_import("late_nowhere", double)
    with pytest.raises(ModuleNotFoundError, match="late_nowhere"):
        importlib.import_module("late_nowhere")


def test_an_import_that_fails_is_not_acted_on(late: Path) -> None:
    (late / "late_part.py").write_text("raise RuntimeError('broken')\n")
    seen: list[ModuleType] = []
    after_import("late_part", seen.append)
    with pytest.raises(RuntimeError, match="broken"):
        importlib.import_module("late_part")
    assert seen == []
