# SPDX-License-Identifier: Apache-2.0
"""A scheduler loads into its own model, on its own device; `interface_probe.py` has SGLang's classes."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from recipe.async_pipeline.verl_bridge.rollout.sglang.scheduler import pipeline_scheduler

ADAPTER = "recipe.async_pipeline.verl_bridge.rollout.sglang.adapter"
"""It imports SGLang."""


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a scheduler of which SGLang's part has a model on the second device, and adapters."""
    for name in ("sglang", "sglang.utils", ADAPTER):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    vars(sys.modules["sglang.utils"])["TypeBasedDispatcher"] = list
    vars(sys.modules[ADAPTER])["SGLangAdapter"] = lambda model, device, manager: SimpleNamespace(
        model=model, device=device, manager=manager
    )
    made: Any = object.__new__(pipeline_scheduler(object))
    made.tp_worker = SimpleNamespace(
        model_runner=SimpleNamespace(model="model", device="cuda:1", lora_manager="manager")
    )
    made.tp_cpu_group = SimpleNamespace(size=lambda: 2)
    made.server_args = SimpleNamespace(node_rank=1)
    return made


@pytest.mark.parametrize(("enabled", "manager"), [(False, None), (True, "manager")])
def test_a_rank_loads_into_the_model_on_its_device(
    scheduler: Any, enabled: bool, manager: str | None
) -> None:
    scheduler.enable_lora = enabled
    made = scheduler._new_rank()._serving.adapter
    assert (made.model, made.device, made.manager) == ("model", torch.device("cuda", 1), manager)
