# SPDX-License-Identifier: Apache-2.0
"""One of several real training ranks: shards a model with FSDP2 and gathers it. Run as a script: RANK COUNT
FILE.

The first one prints a line for each tensor that did not arrive as it is.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from recipe.async_pipeline.verl_bridge.workers.fsdp_shards import TrainingRanks, part_of
from recipe.async_pipeline.weight_sync.arena import ArenaReader, ArenaWriter
from recipe.async_pipeline.weight_sync.board import await_manifest
from recipe.async_pipeline.weight_sync.manifest import Manifest
from recipe.async_pipeline.weight_sync.shard_load import load_parts, prove_parts


def make_model() -> torch.nn.Module:
    """Heights that do not divide, one that is less than the ranks, and a buffer."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 1), torch.nn.Linear(1, 300)
    )
    model.register_buffer("steps", torch.tensor(3))
    return model


def load_back(model: torch.nn.Module, manifest: Manifest, version: int) -> None:
    """Into another model that is sharded alike, which then computes with what was published."""
    published = ArenaReader().tensors(manifest)
    parts = [part_of(name, weight, replicated=True) for name, weight in model.state_dict().items()]
    load_parts(version, published, parts)
    prove_parts(manifest, parts)
    for name, weight in model.state_dict().items():
        whole = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        if not torch.equal(whole, published[name].to(whole.dtype).view(whole.shape)):
            sys.stdout.write(f"v{version} {name} was not loaded back: {whole}\n")


def main(rank: int, count: int, file: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=count)
    mesh = (
        init_device_mesh("cpu", (count,))
        if count < 4
        else init_device_mesh("cpu", (2, count // 2), mesh_dim_names=("replicate", "shard"))
    )
    model = make_model()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    copy = make_model()
    for layer in copy:
        fully_shard(layer, mesh=mesh)
    fully_shard(copy, mesh=mesh)
    ranks = TrainingRanks("this host")
    assert ranks.on_one_host
    assert not TrainingRanks(f"host {rank}").on_one_host or count == 1
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
        load_back(copy, await_manifest(ticket, 30), version)
        ranks.barrier()
        whole = {n: w.full_tensor() if hasattr(w, "full_tensor") else w for n, w in weights.items()}
        if rank == 0:
            manifest = await_manifest(ticket, 30)
            reader = ArenaReader()
            reader.verify(manifest)
            for name, found in reader.tensors(manifest).items():
                wanted = whole.pop(name)
                wanted = wanted.bfloat16() if wanted.is_floating_point() else wanted
                if not torch.equal(found, wanted):
                    sys.stdout.write(f"v{version} {name}: {found} instead of {wanted}\n")
            assert not whole, whole.keys()
    writer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
