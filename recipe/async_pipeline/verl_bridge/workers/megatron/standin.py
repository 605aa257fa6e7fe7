# SPDX-License-Identifier: Apache-2.0
"""Import Megatron-Bridge where Transformer Engine is not installed.

Megatron-Bridge 0.3.1 imports `transformer_engine.pytorch` for its LoRA layers whenever it is imported. For
the duration of that import, stand-in modules provide the names that the class statements need; using one of
the classes raises ImportError.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.metadata import version
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


@dataclass(frozen=True)
class Hole:
    """A fault of a dependency.

    Each hole says whether it is there: `fill_all` repairs only what is, and a test fails as soon as an
    upgrade has closed one, so that its repair is removed.
    """

    name: str
    is_open: Callable[[], bool]
    fill: Callable[[], None]


def _no_general_gemm() -> bool:
    """megatron-core 0.16.1's router uses `te_general_gemm`, which is undefined without Transformer Engine."""
    from megatron.core.transformer.moe import moe_utils

    return not hasattr(moe_utils, "te_general_gemm")


def _define_general_gemm() -> None:
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None


def _leaves_cpu_tensors() -> bool:
    """megatron-core's token dispatcher requires numpy arrays, but gets tensors that are on the CPU."""
    from megatron.core.transformer.moe import moe_utils

    return bool(torch.is_tensor(moe_utils.maybe_move_tensor_to_cpu(torch.ones(1), as_numpy=True)))


def _convert_cpu_tensors() -> None:
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    move = moe_utils.maybe_move_tensor_to_cpu

    def to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if as_numpy and torch.is_tensor(tensor) and not tensor.is_cuda:
            return tensor.numpy()
        return move(tensor, as_numpy, record_stream)

    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = to_cpu


def _scatters_views() -> bool:
    """Megatron-Bridge before 0.4 scatters strided views, which gloo copies wrongly without an error."""
    from megatron.bridge.models.conversion.param_mapping import MegatronParamMapping

    return bridge_version() < (0, 4) and not hasattr(MegatronParamMapping.scatter_to_tp_ranks, "contiguous")


def _scatter_copies() -> None:
    from megatron.bridge.models.conversion.param_mapping import MegatronParamMapping

    scatter = MegatronParamMapping.scatter_to_tp_ranks

    def scatter_to_tp_ranks(self: Any, splits: list[torch.Tensor] | None, *args: Any, **kwargs: Any) -> Any:
        whole = None if splits is None else [split.contiguous() for split in splits]
        return scatter(self, whole, *args, **kwargs)

    scatter_to_tp_ranks.contiguous = True  # type: ignore[attr-defined]
    MegatronParamMapping.scatter_to_tp_ranks = scatter_to_tp_ranks


def bridge_version() -> tuple[int, int]:
    """Return the first two numbers of the installed Megatron-Bridge's version."""
    major, minor = version("megatron-bridge").split(".")[:2]
    return int(major), int(minor)


HOLES = (
    Hole("te_general_gemm", _no_general_gemm, _define_general_gemm),
    Hole("maybe_move_tensor_to_cpu", _leaves_cpu_tensors, _convert_cpu_tensors),
    Hole("scatter_to_tp_ranks", _scatters_views, _scatter_copies),
)


def fill_all() -> tuple[str, ...]:
    """Repair every open hole. Idempotent. Returns the names of the ones that were open."""
    found = tuple(hole for hole in HOLES if hole.is_open())
    for hole in found:
        hole.fill()
    return tuple(hole.name for hole in found)
