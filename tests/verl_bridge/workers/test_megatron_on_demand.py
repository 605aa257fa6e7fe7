# SPDX-License-Identifier: Apache-2.0
"""The light package takes the place of verl's, once, and offers verl's submodules.

`workers/megatron/test_engine.py` makes the engines that it registers.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from recipe.async_pipeline.verl_bridge.workers import megatron_on_demand
from recipe.async_pipeline.verl_bridge.workers.megatron_on_demand import PACKAGE, postpone
from tests.conftest import Load

pytestmark = [
    pytest.mark.real_engine,
    pytest.mark.skipif(find_spec("megatron") is None, reason="no megatron"),
]


@pytest.fixture
def absent(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the package; monkeypatch restores what was imported."""
    load("verl")
    monkeypatch.delitem(sys.modules, PACKAGE, raising=False)
    monkeypatch.setitem(sys.modules, PACKAGE, None)  # type: ignore[arg-type]
    del sys.modules[PACKAGE]


def test_the_light_package_has_the_submodules_of_verl(absent: None) -> None:
    postpone()
    package = sys.modules[PACKAGE]
    (folder,) = package.__path__
    assert (Path(folder) / "transformer_impl.py").is_file()
    postpone()
    assert sys.modules[PACKAGE] is package
    with pytest.raises(AttributeError, match="no such_engine on the CPU platform"):
        _ = package.such_engine


def test_without_megatron_verl_says_that_it_is_missing(absent: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        megatron_on_demand, "find_spec", lambda name: None if name == "megatron" else find_spec(name)
    )
    postpone()
    assert PACKAGE not in sys.modules


def test_verl_finds_the_engines_of_the_cpu_platform(load: Load) -> None:
    registry = load("verl.workers.engine").EngineRegistry
    for kind in ("language_model", "value_model"):
        engine = registry.get_engine_cls(kind, "megatron")
        assert engine.__module__ == megatron_on_demand.__name__
        assert registry.get_engine_cls(kind, "fsdp2").__module__.startswith("verl.")
    assert "megatron.core" not in sys.modules
