# SPDX-License-Identifier: Apache-2.0
"""Where rollout servers start, and with which config."""

from __future__ import annotations

import sys
from queue import Queue
from types import ModuleType
from typing import Any

import pytest

from tests import HANG_S

pytestmark = pytest.mark.real_engine


@pytest.mark.parametrize(("engine", "replica"), [("vllm", "PipelineVLLMReplica"), ("sglang", "Other")])
def test_each_engine_has_its_replicas(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, engine: str, replica: str
) -> None:
    # SGLang itself would bring its stubs into this process.
    sglang = ModuleType("recipe.async_pipeline.verl_bridge.rollout.sglang.server")
    sglang.PipelineSGLangReplica = type("Other", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, sglang.__name__, sglang)
    assert module.replica_class_of(engine).__name__ == replica


@pytest.mark.parametrize(("devices", "early"), [([2], True), ([2, 0], True), ([2, 1], False)])
def test_replicas_start_early_only_where_they_cannot_split_the_training_devices(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, devices: list[int], early: bool
) -> None:
    nodes = [{"Alive": True, "Resources": {"GPU": count} if count else {}} for count in devices]
    gone = {"Alive": False, "Resources": {"GPU": 8}}
    monkeypatch.setattr(module.ray, "nodes", lambda: [*nodes, gone])
    monkeypatch.setattr(module, "get_resource_name", lambda: "GPU")
    begun: list[object] = []
    # Another thread must not import these packages at the same time.
    monkeypatch.setattr(module, "import_model_packages", lambda config: begun.append("packages"))

    class Manager(module.PipelineServerManager):  # type: ignore[misc,name-defined]
        def __init__(self, config: object) -> None:
            begun.append(config)

    Manager.start_early("config")
    assert begun == (["packages", "config"] if early else [])
    Manager.started("config")
    assert begun[-1:] == ["config"] and begun.count("config") == 1, "once"


def test_servers_start_with_a_copy_of_the_config(module: ModuleType) -> None:
    """They start in another thread, while the trainer copies and resolves its config."""
    from omegaconf import OmegaConf

    seen: Queue[Any] = Queue()

    class Manager(module.PipelineServerManager):  # type: ignore[misc,name-defined]
        async def _initialize_llm_servers(self, start_rank: int | None = None) -> None:
            seen.put(self.config)

    rollout = {"nnodes": 1, "name": "vllm", "disaggregation": {"enabled": False}}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout, "model": {"path": "m"}}})
    manager = Manager(config)
    found = seen.get(timeout=HANG_S)
    assert found == config and found is not config
    assert manager.rollout_config is found.actor_rollout_ref.rollout
