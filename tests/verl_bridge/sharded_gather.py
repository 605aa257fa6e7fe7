# SPDX-License-Identifier: Apache-2.0
"""Shard a model with FSDP2 and gather it, as one of several ranks.

Rank 0 prints a line for each tensor whose gathered values differ.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from recipe.async_pipeline.verl_bridge.workers.fsdp_shards import TrainingRanks, part_of
from recipe.async_pipeline.weight_sync.engine.shard_load import load_parts, prove_parts
from recipe.async_pipeline.weight_sync.memory.arena import ArenaReader, ArenaWriter
from recipe.async_pipeline.weight_sync.memory.board import await_manifest
from recipe.async_pipeline.weight_sync.memory.manifest import Manifest
from tests import HANG_S
from tests.fakes.sharded_model import make_model


def load_back(model: torch.nn.Module, manifest: Manifest, version: int) -> None:
    """Load a published version into an equally sharded model, and print the tensors that differ."""
    published = ArenaReader().tensors(manifest)
    parts = [part_of(name, weight, replicated=True) for name, weight in model.state_dict().items()]
    load_parts(version, published, parts)
    prove_parts(manifest, parts)
    for name, weight in model.state_dict().items():
        whole = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        if not torch.equal(whole, published[name].to(whole.dtype).view(whole.shape)):
            sys.stdout.write(f"v{version} {name} was not loaded back: {whole}\n")


def run_rank(rank: int, *, count: int, file: str) -> None:
    """Run one of `count` ranks, which meet at `file`."""
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=count)
    mesh = (
        init_device_mesh("cpu", (count,))
        if count < 4
        else init_device_mesh("cpu", (2, count // 2), mesh_dim_names=("replicate", "shard"))
    )
    model, copy = make_model(), make_model()
    for one in (model, copy):
        for layer in one:
            fully_shard(layer, mesh=mesh)
        fully_shard(one, mesh=mesh)

    ranks = TrainingRanks("this host")
    assert (ranks.hosts, ranks.rank) == (1, rank)
    apart = TrainingRanks(f"host {rank}")
    assert (apart.hosts, apart.rank) == (count, 0)

    writer = ArenaWriter(512, 4, torch.bfloat16, ranks)
    for version in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(version)
        weights = model.state_dict()
        ticket = ranks.share(
            writer.gather_parts(version, [part_of(name, weight) for name, weight in weights.items()])
        )
        assert ticket is not None
        load_back(copy, await_manifest(ticket, HANG_S), version)
        ranks.barrier()

        whole = {n: w.full_tensor() if hasattr(w, "full_tensor") else w for n, w in weights.items()}
        if rank == 0:
            manifest = await_manifest(ticket, HANG_S)
            reader = ArenaReader()
            reader.verify(manifest)
            for name, found in reader.tensors(manifest).items():
                expected = whole.pop(name)
                expected = expected.bfloat16() if expected.is_floating_point() else expected
                if not torch.equal(found, expected):
                    sys.stdout.write(f"v{version} {name}: {found} instead of {expected}\n")
            assert not whole, whole.keys()

    writer.close()
    dist.destroy_process_group()
