# SPDX-License-Identifier: Apache-2.0
"""The weights of a training rank, as the parts that it publishes or as whole tensors, for each engine.

An engine is one module with `held_by` and `assembled`; `ENGINES` names it. An engine without a module
publishes whole tensors, as verl exports them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, NamedTuple

import torch

from ...errors import WeightSyncError
from ...weight_sync.memory.arena import HeldBlock

ENGINES: Mapping[str, str] = {
    "fsdp": ".fsdp_shards",
    "fsdp2": ".fsdp_shards",
    "megatron": ".megatron.shards",
}
"""The module of each training strategy. Imported when it is needed, as Megatron may not be installed."""


class Held(NamedTuple):
    """The parts that this rank publishes."""

    parts: list[HeldBlock]
    adapter: str | None
    """Set if the parts are of a LoRA adapter; see `Manifest`."""


class Assembled(NamedTuple):
    """Whole tensors, for an engine whose parts cannot be published."""

    weights: Iterator[tuple[str, torch.Tensor]]
    """Iterating is a collective."""
    adapter: str | None
    """Set if the tensors are of a LoRA adapter; see `Manifest`."""


def held_by(engine: Any, *, replicated: bool = False) -> Held | None:
    """Return this rank's parts of all trained tensors, without copying. The order is the same on all
    ranks. A collective the first time.

    Each element is in the part of one rank; with `replicated`, in the parts of all ranks that hold it, as
    a load requires.

    Returns None if the engine changes its weights before they are sent (merged adapters, quantization), so
    that it has to assemble them itself.
    """
    module = _module_of(engine)
    held: Held | None = None if module is None else module.held_by(engine, replicated=replicated)
    return held


def assembled(engine: Any) -> Assembled:
    """Return all trained tensors as whole tensors on each rank. A collective.

    Raises WeightSyncError if only an adapter is trained and the engine has no module.
    """
    module = _module_of(engine)
    if module is not None:
        whole: Assembled = module.assembled(engine)
        return whole
    weights, adapter = engine.get_per_tensor_param()
    if adapter is not None:
        strategy = engine.engine_config.strategy
        raise WeightSyncError(f"adapters of {strategy} are not published; train all weights, or use fsdp2")
    return Assembled(iter(weights), None)


def offload_again(engine: Any) -> None:
    """Offload the weights of an engine that loaded them to its device for `held_by`, if it keeps them off."""
    if engine.engine_config.strategy == "megatron" and engine.is_param_offload_enabled:
        engine.to("cpu", model=True, optimizer=False, grad=False)


def _module_of(engine: Any) -> Any:
    name = ENGINES.get(engine.engine_config.strategy)
    return None if name is None else import_module(name, __package__)
