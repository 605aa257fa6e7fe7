# SPDX-License-Identifier: Apache-2.0
"""Gather a model of two Megatron ranks on two hosts; each host has its own shared memory.

Arguments: HOST FOLDER LAYOUT VERSIONS. Runs the rank of one host, which answers requests for its share on a
socket in the folder. The first rank writes what each version should be to FOLDER/VERSION.pt.
"""

from __future__ import annotations

import os
import sys
import warnings
from multiprocessing.connection import Listener
from pathlib import Path

import torch
import torch.distributed as dist

from tests.verl_bridge.workers.megatron import layouts, tiny_models
from tests.verl_bridge.workers.megatron.gather_cost import LAYOUTS

BUCKET_BYTES = 64 << 10


def main(host: int, folder: Path, name: str, versions: int) -> None:
    from recipe.async_pipeline.verl_bridge.workers.fsdp_shards import TrainingRanks
    from recipe.async_pipeline.verl_bridge.workers.shards import held_by
    from recipe.async_pipeline.weight_sync.memory.arena import ArenaWriter
    from tests.verl_bridge.gather_on_hosts import serve

    warnings.simplefilter("ignore")
    layouts.import_stack()
    layout = LAYOUTS[name]
    os.environ.update(RANK=str(host), WORLD_SIZE="2", LOCAL_RANK="0")
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=host, world_size=2)
    if host == 0:
        tiny_models.make(layout.family, folder)
    dist.barrier()
    engine = layouts.Check(folder, name, layout).engine

    writer = ArenaWriter(BUCKET_BYTES, 4, torch.float32, TrainingRanks(f"host {host}"))
    listener = Listener(str(folder / f"host-{host}"), backlog=16)
    for version in range(versions):
        train(engine, version)
        whole = {name: weight.clone() for name, weight in engine.get_per_tensor_param()[0]}
        if host == 0:
            torch.save(whole, folder / f"{version}.pt")
        held = held_by(engine)
        assert held is not None
        dist.barrier()
        ticket = writer.gather_parts(version, held.parts)
        assert ticket is not None, "each rank is the first of its host"
        serve(listener, ticket)
        dist.barrier()
    writer.close()
    dist.destroy_process_group()


def train(engine: object, version: int) -> None:
    with torch.no_grad():
        for module in engine.module:  # type: ignore[attr-defined]
            for parameter in module.parameters():
                parameter.add_(1e-3 * (1 + version))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
