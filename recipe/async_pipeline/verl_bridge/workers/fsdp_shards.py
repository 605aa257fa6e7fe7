# SPDX-License-Identifier: Apache-2.0
"""The shard of the weights on each training rank, under the names that a rollout engine loads.

verl assembles every tensor on every rank before sending it. An FSDP2 rank knows which block of which
tensor it holds, so it copies that block into memory of its host, and no tensor is assembled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from peft import get_peft_model_state_dict
from torch.distributed.tensor import DTensor
from verl.utils.fsdp_utils import fsdp_version
from verl.utils.model import convert_weight_keys
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine
from verl.workers.engine.fsdp.utils import unfuse_moe_params
from verl.workers.engine.spec import BlockPlacement, ShardSpec, derive_dtensor_placement

from ...errors import WeightSyncError
from ...weight_sync.hosts.shares import T
from ...weight_sync.memory.arena import HeldBlock
from .shards import Assembled, Held

FUSED_EXPERTS: Mapping[str, Sequence[str]] = {
    ".mlp.experts.gate_up_proj": ("gate_proj", "up_proj"),
    ".mlp.experts.down_proj": ("down_proj",),
    # Of Nemotron-H, whose experts have no gate.
    ".mixer.experts.up_proj": ("up_proj",),
    ".mixer.experts.down_proj": ("down_proj",),
}
"""Names that end tensors with all experts of a layer, and the matrices that each has of an expert."""
_OF_MIXTRAL = (
    (".mlp.", ".block_sparse_moe."),
    (".gate_proj.", ".w1."),
    (".down_proj.", ".w2."),
    (".up_proj.", ".w3."),
)
_OF_QWEN_VL = (("model.visual.", "visual."), ("model.language_model.", "model."))
IN_CHECKPOINTS: Mapping[str, Sequence[tuple[str, str]]] = {
    "mixtral": _OF_MIXTRAL,
    "minimax": _OF_MIXTRAL,
    "minimax_m2": _OF_MIXTRAL,
    "phimoe": (*_OF_MIXTRAL, (".router.", ".gate.")),
    "qwen2_vl": _OF_QWEN_VL,
    "qwen2_5_vl": _OF_QWEN_VL,
}
"""Parts of names that transformers changes when it loads a checkpoint of these models, and what they were.
Engines load the names of checkpoints; verl undoes only the fusion of experts.
"""


class TrainingRanks:
    """The ranks of this process's process group that are on this host."""

    def __init__(self, node: str) -> None:
        """`node` identifies this host. A collective of all ranks of all hosts."""
        nodes: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(nodes, node)
        self.hosts = len(set(nodes))
        self._members = [rank for rank, of_rank in enumerate(nodes) if of_rank == node]
        self.rank = self._members.index(dist.get_rank())
        self._group: Any = None
        """None: all ranks."""
        if self.hosts > 1:
            for host in dict.fromkeys(nodes):
                # All ranks make all groups, in the same order.
                group = dist.new_group([rank for rank, of_rank in enumerate(nodes) if of_rank == host])
                self._group = group if host == node else self._group

    def share(self, value: T) -> T:
        shared = [value]
        dist.broadcast_object_list(shared, src=self._members[0], group=self._group)
        return shared[0]

    def all(self, value: T) -> list[T]:
        values = [value] * len(self._members)
        dist.all_gather_object(values, value, group=self._group)
        return values

    def barrier(self) -> None:
        if len(self._members) > 1:
            dist.barrier(group=self._group)


def held_by(engine: Any, *, replicated: bool = False) -> Held | None:
    """Return this rank's parts; see `workers.shards.held_by`. Returns None if the engine is not FSDP2, or
    changes its weights before they are sent (merged adapters, quantization).
    """
    if getattr(type(engine), "get_per_tensor_param", None) is not FSDPEngine.get_per_tensor_param:
        return None
    module = engine.module
    if fsdp_version(module) != 2 or engine._qat_enabled:
        return None
    if hasattr(module, "peft_config"):
        if engine.model_config.lora.get("merge", False):
            return None
        return Held(
            [part_of(*named, replicated=replicated) for named in adapter_of(module).items()],
            described(module.peft_config["default"]),
        )
    weights = convert_weight_keys(module.state_dict(), module)
    model_type = engine.model_config.hf_config.model_type
    parts = [part_of(*named, replicated=replicated) for named in weights.items()]
    return Held([part for whole in parts for part in published(whole, model_type)], None)


def assembled(engine: Any) -> Assembled:
    """Return all trained tensors as whole tensors on each rank. A collective.

    verl would return the base of an adapter, because it assumes that engines do not have it yet.
    """
    module = engine.module
    if not hasattr(module, "peft_config") or engine.model_config.lora.get("merge", False):
        weights, _ = engine.get_per_tensor_param()
        model_type = engine.model_config.hf_config.model_type
        # verl leaves fused experts as they are only where it merges adapters.
        whole = unfuse_moe_params(weights, model_type)
        return Assembled(((in_checkpoint(name, model_type), tensor) for name, tensor in whole), None)
    if fsdp_version(module) != 2:
        raise WeightSyncError("LoRA adapters can be published without their base with fsdp2 only; set it")
    tensors = adapter_of(module).items()
    return Assembled(
        ((name, value.full_tensor() if isinstance(value, DTensor) else value) for name, value in tensors),
        described(module.peft_config["default"]),
    )


def adapter_of(module: Any) -> dict[str, torch.Tensor]:
    """Return the adapter's tensors under peft's names. Raises WeightSyncError if some are not LoRA."""
    tensors: dict[str, torch.Tensor] = get_peft_model_state_dict(module)
    other = [name for name in tensors if ".lora_A." not in name and ".lora_B." not in name]
    if other:
        raise WeightSyncError(f"{other[0]} is trained with the adapter, but engines load LoRA tensors only")
    return tensors


def described(config: Any) -> str:
    """Return a peft configuration as JSON."""
    return json.dumps(
        config.to_dict(), default=lambda value: sorted(value) if isinstance(value, set) else str(value)
    )


def part_of(name: str, weight: torch.Tensor, *, replicated: bool = False) -> HeldBlock:
    """Return the block of a tensor that this rank writes or, if `replicated`, that it holds."""
    shape = tuple(weight.shape)
    if not isinstance(weight, DTensor):
        # The value is the same on all ranks, so the owner of the memory writes it.
        mine = replicated or not dist.is_initialized() or dist.get_rank() == 0
        return HeldBlock(name, shape, weight.dtype, (0,) * weight.dim(), weight.detach() if mine else None)
    offset, contributes = _block(shape, weight.device_mesh, tuple(weight.placements))
    with torch.no_grad():
        local = weight.to_local()
    return HeldBlock(name, shape, weight.dtype, offset, local if contributes or replicated else None)


@cache
def _block(shape: tuple[int, ...], mesh: Any, placements: tuple[Any, ...]) -> tuple[tuple[int, ...], bool]:
    """Return the first index of this rank's block, and whether this rank writes it."""
    place, contributes, group = derive_dtensor_placement(ShardSpec(shape, mesh, placements))
    if isinstance(place, BlockPlacement):
        return tuple(place.global_offset), contributes
    return (0,) * len(shape), mesh.get_coordinate() is not None and not any(mesh.get_coordinate())


def published(part: HeldBlock, model_type: str) -> Iterator[HeldBlock]:
    """Return a part of a tensor of transformers as the parts of tensors that engines load."""
    for one in unfused(part, model_type):
        yield one._replace(name=in_checkpoint(one.name, model_type))


def in_checkpoint(name: str, model_type: str) -> str:
    """Return the name that a tensor has in checkpoints."""
    for here, there in IN_CHECKPOINTS.get(model_type, ()):
        name = name.replace(here, there)
    return name


def unfused(part: HeldBlock, model_type: str) -> Iterator[HeldBlock]:
    """Split fused experts: transformers keeps a layer's experts in one tensor, engines load each by
    itself.

    The names are the ones that verl's `unfuse_moe_params` gives, which leaves Nemotron-H's fused.
    """
    names = next((of for end, of in FUSED_EXPERTS.items() if part.name.endswith(end)), ())
    if not names or len(part.shape) != 3 or model_type == "gpt_oss":
        yield part
        return
    base = part.name.rpartition(".")[0]
    experts, rows, columns = part.shape
    height = rows // len(names)
    for expert in range(experts):
        for index, name in enumerate(names):
            nothing = HeldBlock(f"{base}.{expert}.{name}.weight", (height, columns), part.dtype, (0, 0), None)
            yield _rows_of_expert(part, expert, index * height, nothing)


def _rows_of_expert(part: HeldBlock, expert: int, first_row: int, whole: HeldBlock) -> HeldBlock:
    """Return the share of `whole`, which begins at `first_row` of an expert, in a part of the fusion."""
    if part.values is None:
        return whole
    inside = expert - part.offset[0]
    row, column = part.offset[1] - first_row, part.offset[2]
    rows = range(max(0, row), min(whole.shape[0], row + part.values.shape[1]))
    if not 0 <= inside < part.values.shape[0] or not rows:
        return whole
    values = part.values[inside, rows.start - row : rows.stop - row]
    return whole._replace(offset=(rows.start, column), values=values)
