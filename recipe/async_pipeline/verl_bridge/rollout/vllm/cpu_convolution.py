# SPDX-License-Identifier: Apache-2.0
"""Keep the weights of vLLM's convolutions unpacked on a CPU with AMX.

vLLM packs them there when the model is built, and again after each load: neither could they be loaded in
place, nor compared with the published ones. Its kernel also takes a weight that is not packed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

PACKED = ("is_vnni", "is_weight_packed")
"""The argument that says whether a weight is packed, in vLLM before and since 0.32."""


def of_matrices_alone(stock: Callable[..., None]) -> Callable[..., None]:
    """Return vLLM's `dispatch_cpu_unquantized_gemm`, which leaves layers other than linear ones alone."""

    def dispatch_cpu_unquantized_gemm(layer: torch.nn.Module, remove_weight: bool) -> None:
        if layer.weight.dim() == 2:
            stock(layer, remove_weight)

    return dispatch_cpu_unquantized_gemm


def of_unpacked(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel of vLLM's convolutions, called with the weight of a layer instead of a packed one."""

    def causal_conv1d(*, weight: torch.Tensor, **others: Any) -> Any:
        if not {*others} & {*PACKED}:
            raise TypeError(
                f"vLLM's convolution has neither {' nor '.join(PACKED)} to say that it is not packed"
            )
        unpacked = {name: False if name in PACKED else value for name, value in others.items()}
        return stock(weight=weight.flatten(1), **unpacked)

    return causal_conv1d
