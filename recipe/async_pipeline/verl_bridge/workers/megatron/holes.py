# SPDX-License-Identifier: Apache-2.0
"""Faults of the pinned megatron-core and Megatron-Bridge without CUDA or Transformer Engine, and their
repair.

Each hole says whether it is there: `fill_all` repairs only what is, and a test fails as soon as an upgrade
has closed one, so that its repair is removed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch


@dataclass(frozen=True)
class Hole:
    """A fault of a dependency."""

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
