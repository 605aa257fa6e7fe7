# SPDX-License-Identifier: Apache-2.0
"""The shard of the weights on each Megatron rank, under the names that a rollout engine loads.

Megatron-Bridge gathers a parameter from all ranks and rearranges it into the tensors of transformers. Here,
each rank learns once which of its elements end up where, and then writes them there itself: no tensor is
assembled.

The plan comes from the bridge's own mappings. verl's `make_probe` runs a mapping with its collectives
stubbed, so that the elements of other ranks are NaN. It is fed the index of each element instead of its
value, which tells for each element of a tensor which local element it is. In every mapping that only
rearranges, that is a strided view of the parameter; this is checked element by element.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.core import parallel_state
from verl.utils.megatron_utils import load_megatron_model_to_gpu
from verl.workers.engine.megatron.delta_export import _NAN_POOL, make_probe

from ....console import echo
from ....errors import WeightSyncError
from ....observe.table import MARK
from ....weight_sync.memory.arena import HeldBlock
from ..shards import Assembled, Held
from .element_views import ParameterView, cut, fitted

PLAN = "_async_pipeline_plan"
"""The attribute of an engine that keeps its plan."""
EXACT = 2**24
"""Whole numbers below this are exact in float32."""


@dataclass(frozen=True)
class ShardPiece:
    """What this rank holds of one tensor."""

    parameter: torch.Tensor
    view: ParameterView
    offset: tuple[int, ...]
    """Index of the block's first element in the tensor."""
    block: tuple[int, ...]
    """Shape of the block."""
    writes: bool
    """Whether this rank, of all that hold the same block, publishes it."""


@dataclass(frozen=True)
class PublishPlan:
    """All tensors of the model, in an order that is the same on all ranks."""

    tensors: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    pieces: dict[str, ShardPiece]

    def parts(self, *, replicated: bool) -> list[HeldBlock]:
        """Return this rank's parts; the ones that other ranks publish have no values."""
        parts = []
        for name, shape, dtype in self.tensors:
            piece = self.pieces.get(name)
            if piece is None or not (piece.writes or replicated):
                parts.append(HeldBlock(name, shape, dtype, (0,) * len(shape), None))
            else:
                values = piece.view.of(piece.parameter)
                parts.append(HeldBlock(name, shape, dtype, piece.offset, values, piece.block))
        return parts


class NotRearranged(Exception):
    """A mapping computes, or its result is no strided view."""


def held_by(engine: Any, *, replicated: bool = False) -> Held | None:
    """Return this rank's parts; see `workers.shards.held_by`. Returns None, on all ranks, if one tensor is
    computed instead of rearranged (LoRA, quantization, an unknown mapping).
    """
    load_megatron_model_to_gpu(engine.module, load_grad=False)
    if not hasattr(engine, PLAN):
        setattr(engine, PLAN, make_plan(engine))
    plan: PublishPlan | None = getattr(engine, PLAN)
    return None if plan is None else Held(plan.parts(replicated=replicated), None)


def assembled(engine: Any) -> Assembled:
    """Return all tensors, or the ones of an adapter that is not merged, as Megatron-Bridge assembles them.
    A collective.
    """
    # verl would return the base of an adapter, because it assumes that engines do not have it yet.
    weights, adapter = engine.get_per_tensor_param(base_sync_done=True)
    return Assembled(iter(weights), None if adapter is None else json.dumps(adapter))


def make_plan(engine: Any) -> PublishPlan | None:
    """Learn what this rank holds. A collective; returns None on all ranks if one cannot.

    Raises WeightSyncError if the ranks do not have the same tensors.
    """
    found: list[tuple[str, tuple[int, ...], torch.dtype, ShardPiece]] = []
    problem = computes(engine)
    if problem is None:
        try:
            for task in engine.bridge.get_conversion_tasks(engine.module):
                if task.param_weight is not None:
                    found += pieces_of(task)
        except NotRearranged as error:
            problem = str(error)
        finally:
            # The probes keep a tensor of NaN for each shape; the plan was their only use.
            _NAN_POOL.clear()

    described = [(name, shape, dtype) for name, shape, dtype, _ in found]
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, (problem, described))
    problems = [of_rank for of_rank, _ in of_all if of_rank is not None]
    if problems:
        if dist.get_rank() == 0:
            echo(f"{MARK} weights are assembled before each publication: {problems[0]}")
        return None

    union = {tensor for _, tensors in of_all for tensor in tensors}
    tensors = tuple(sorted(union, key=lambda tensor: tensor[0]))
    if len({name for name, _, _ in tensors}) != len(tensors):
        raise WeightSyncError("Megatron's ranks disagree about the shape or the dtype of a tensor")
    return PublishPlan(tensors, {name: piece for name, _, _, piece in found})


def computes(engine: Any) -> str | None:
    """Return why the engine's export is more than a rearrangement, or None if it is not."""
    if engine.vanilla_bridge:
        return "vanilla_mbridge has no conversion tasks"
    if engine.peft_cls is not None:
        return "LoRA adapters are merged or exported by Megatron-Bridge"
    if engine._qat_enabled or getattr(engine.bridge, "export_weight_dtype", None) == "fp8":
        return "weights are quantized when they are exported"
    bridge = type(engine.bridge._model_bridge)
    if bridge.maybe_modify_converted_hf_weight is not MegatronModelBridge.maybe_modify_converted_hf_weight:
        return f"{bridge.__name__} changes converted weights"
    return None


def pieces_of(task: Any) -> Iterator[tuple[str, tuple[int, ...], torch.dtype, ShardPiece]]:
    """Yield name, shape and dtype of the tensors that a parameter is part of, with this rank's piece.

    Raises NotRearranged if a piece is not a strided view of the parameter.
    """
    parameter, mapping = task.param_weight, task.mapping
    writes = is_writer(mapping, parameter)
    probe = make_probe(mapping, task.megatron_module)
    if not parameter.is_contiguous():
        raise NotRearranged(f"{task.global_param_name} is not contiguous")

    # Two numbers for each element, since one would need float64 for a large parameter.
    rows, columns = parameter.shape[0], parameter.numel() // max(1, parameter.shape[0])
    if max(rows, columns) >= EXACT:
        raise NotRearranged(f"{task.global_param_name} is larger than {EXACT} in one dimension")
    by_row = torch.arange(rows, dtype=torch.float32).repeat_interleave(columns).view(parameter.shape)
    of_rows = cut(probe.megatron_to_hf(by_row, task.megatron_module))
    del by_row
    by_column = torch.arange(columns, dtype=torch.float32).repeat(rows).view(parameter.shape)
    of_columns = cut(probe.megatron_to_hf(by_column, task.megatron_module))
    del by_column

    for name, (shape, offset, row) in of_rows.items():
        same_shape, same_offset, column = of_columns[name]
        if row is None or column is None or (shape, offset) != (same_shape, same_offset):
            raise NotRearranged(f"{name} is not one block on a rank")
        view = fitted(row, column, columns)
        if view is None:
            raise NotRearranged(f"{name} is not a strided view of {task.global_param_name}")
        yield name, shape, parameter.dtype, ShardPiece(parameter, view, offset, tuple(row.shape), writes)


def is_writer(mapping: Any, parameter: torch.Tensor) -> bool:
    """Return whether this rank publishes what it holds of a parameter: one of all ranks that hold the
    same.
    """
    if mapping.is_expert:
        return bool(parallel_state.get_expert_data_parallel_rank() == 0)
    replicas = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    split = getattr(parameter, "tensor_model_parallel", False)
    return replicas == 0 and (split or parallel_state.get_tensor_model_parallel_rank() == 0)
