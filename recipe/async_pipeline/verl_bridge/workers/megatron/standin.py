# SPDX-License-Identifier: Apache-2.0
"""Import Megatron-Bridge where Transformer Engine is not installed.

Megatron-Bridge 0.3.1 imports `transformer_engine.pytorch` for its LoRA layers whenever it is imported. For
the duration of that import, stand-in modules provide the names that the class statements need; using one of
the classes raises ImportError.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

NAME = "transformer_engine"
PROBING = (
    "megatron.core",
    "megatron.core.extensions.transformer_engine",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.transformer.moe.moe_layer",
)
"""Modules that look for Transformer Engine when they are imported; they must not find the stand-in."""


class _Absent:
    """A class of Transformer Engine that nothing may use."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ImportError("Transformer Engine is not installed; LoRA with Megatron requires it")


def import_bridge() -> ModuleType:
    """Import `megatron.bridge` and return it, with a stand-in for Transformer Engine if that is missing.

    Raises ImportError if megatron-core or megatron-bridge is not installed.
    """
    if "megatron.bridge" in sys.modules or find_spec(NAME) is not None:
        return importlib.import_module("megatron.bridge")
    for name in PROBING:
        importlib.import_module(name)
    with stand_in():
        return importlib.import_module("megatron.bridge")


@contextmanager
def stand_in() -> Iterator[None]:
    """Make `import transformer_engine.pytorch` succeed inside the context, and only there."""
    package, pytorch = ModuleType(NAME), ModuleType(f"{NAME}.pytorch")
    package.__path__ = []
    members = {
        # Subclassed by LoRA's layers, whose class statements inspect nothing.
        "Linear": type("Linear", (torch.nn.Linear,), {}),
        "LayerNormLinear": type("LayerNormLinear", (_Absent,), {}),
        "ops": SimpleNamespace(Sequential=type("Sequential", (_Absent,), {})),
    }
    for name, value in members.items():
        setattr(pytorch, name, value)
    package.pytorch = pytorch  # type: ignore[attr-defined]
    for module in (package, pytorch):
        module.__spec__ = ModuleSpec(module.__name__, None)
        sys.modules[module.__name__] = module
    try:
        yield
    finally:
        for module in (package, pytorch):
            sys.modules.pop(module.__name__, None)
