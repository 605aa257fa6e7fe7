# SPDX-License-Identifier: Apache-2.0
"""Publish and save the adapters of a model that FSDP2 shards, as one of several ranks.

Each rank prints a line for each tensor that arrives elsewhere with other values.
"""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from verl.workers.config import FSDPEngineConfig
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

from recipe.async_pipeline.verl_bridge.workers.fsdp_shards import TrainingRanks, assembled, held_by
from recipe.async_pipeline.verl_bridge.workers.training_worker import PipelineWorker
from recipe.async_pipeline.weight_sync.engine.shard_load import load_parts, prove_parts, require_same_adapter
from recipe.async_pipeline.weight_sync.memory.arena import ArenaReader, ArenaWriter
from recipe.async_pipeline.weight_sync.memory.board import await_manifest
from tests import HANG_S


def make_engine(mesh: Any) -> Any:
    """Return an engine of verl's class with what publishing reads: a small model with adapters."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    module = get_peft_model(layers, LoraConfig(r=4, lora_alpha=8, target_modules=["0", "1"]))
    model = SimpleNamespace(
        lora={}, lora_rank=4, use_remove_padding=False, hf_config=SimpleNamespace(model_type="qwen2")
    )
    engine = FSDPEngine(model, FSDPEngineConfig(strategy="fsdp2", use_torch_compile=False), None, None)
    engine.module = layers
    assert held_by(engine) is None, "not sharded by FSDP2"
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    engine.module = module
    return engine


def worker_of(engine: Any, rank: int, count: int) -> Any:
    """Return a worker of a pool for the reference, with this model."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(count), MASTER_ADDR="", MASTER_PORT="")
    worker: Any = PipelineWorker(OmegaConf.create({"actor": {"strategy": "fsdp2"}, "ref": {}}), "ref")
    worker.ref = SimpleNamespace(engine=engine)
    return worker


def whole(engine: Any) -> dict[str, torch.Tensor]:
    return {name: value.full_tensor() for name, value in engine.module.state_dict().items()}


def run_rank(rank: int, *, count: int, file: str) -> None:
    """Run one of `count` ranks, which meet at `file`."""
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=count)
    mesh = init_device_mesh("cpu", (count,))
    trained, copy = make_engine(mesh), make_engine(mesh)
    with torch.no_grad():
        for parameter in trained.module.parameters():
            parameter.copy_(parameter + 1)  # base weights too, which must stay here
    before = whole(copy)

    ranks = TrainingRanks("this host")
    writer = ArenaWriter(512, 4, None, ranks)
    mine = held_by(trained)
    assert mine is not None and mine.adapter is not None
    ticket = ranks.share(writer.gather_parts(1, mine.parts, mine.adapter))
    assert ticket is not None
    manifest = await_manifest(ticket, HANG_S)
    published = ArenaReader().tensors(manifest)

    held = held_by(copy, replicated=True)
    assert held is not None
    require_same_adapter(manifest, held.adapter)
    load_parts(1, published, held.parts)
    prove_parts(manifest, held.parts)
    wanted = whole(trained)
    for name, value in whole(copy).items():
        expected = wanted[name] if ".lora_" in name else before[name]
        if not torch.equal(value, expected):
            sys.stdout.write(f"{name} was not loaded: {value} instead of {expected}\n")

    # New workers load what the ranks have saved.
    fresh = make_engine(mesh)
    worker_of(copy, rank, count).save_reference(f"{file}-saved")
    worker_of(fresh, rank, count).load_reference(f"{file}-saved")
    loaded = whole(copy)
    for name, value in whole(fresh).items():
        if not torch.equal(value, loaded[name]):
            sys.stdout.write(f"{name} was not saved: {value} instead of {loaded[name]}\n")

    # Ranks on several hosts publish whole tensors: the same names and values.
    tensors, adapter = assembled(trained)
    assert adapter == mine.adapter
    if {name: value.tolist() for name, value in tensors} != {n: v.tolist() for n, v in published.items()}:
        sys.stdout.write("whole tensors differ from the parts\n")

    ranks.barrier()
    writer.close()
    dist.destroy_process_group()
