# SPDX-License-Identifier: Apache-2.0
"""Each training strategy that a run may have is in the table, with both functions."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests import REPOSITORY
from tests.conftest import Load

pytestmark = pytest.mark.real_engine
SHARDS = "recipe.async_pipeline.verl_bridge.workers.shards"
WORKERS = REPOSITORY / "recipe" / "async_pipeline" / "verl_bridge" / "workers"


@pytest.fixture
def shards(load: Load) -> ModuleType:
    return load(SHARDS)


def test_the_table_names_modules_with_both_functions(shards: ModuleType) -> None:
    """Megatron's is read, not imported: that would change this process."""
    for module in set(shards.ENGINES.values()):
        tree = ast.parse(Path(WORKERS, *module.strip(".").split(".")).with_suffix(".py").read_text("utf-8"))
        defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert {"held_by", "assembled"} <= defined, module


@pytest.mark.parametrize(
    ("strategy", "offloads", "calls"), [("megatron", True, 1), ("megatron", False, 0), ("fsdp2", True, 0)]
)
def test_what_was_loaded_for_the_gather_is_offloaded_again(
    shards: ModuleType, strategy: str, offloads: bool, calls: int
) -> None:
    moved: list[Any] = []
    engine = SimpleNamespace(
        engine_config=SimpleNamespace(strategy=strategy),
        is_param_offload_enabled=offloads,
        to=lambda device, **parts: moved.append((device, parts)),
    )
    shards.offload_again(engine)
    assert moved == [("cpu", {"model": True, "optimizer": False, "grad": False})] * calls


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_the_strategy_of_the_engine_selects(
    load: Load, shards: ModuleType, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = SimpleNamespace(engine_config=SimpleNamespace(strategy=strategy))
    module = load("recipe.async_pipeline.verl_bridge.workers.fsdp_shards")
    monkeypatch.setattr(module, "held_by", lambda engine, *, replicated: ("parts", replicated))
    monkeypatch.setattr(module, "assembled", lambda engine: "whole")
    assert shards.held_by(engine, replicated=True) == ("parts", True)
    assert shards.assembled(engine) == "whole"
