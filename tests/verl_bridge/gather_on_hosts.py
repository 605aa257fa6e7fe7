# SPDX-License-Identifier: Apache-2.0
"""Shard a model with FSDP2 over ranks of several hosts and gather it; each host has its own shared memory.

Arguments: HOST HOSTS RANKS FOLDER. Runs the ranks of one host, the first of which answers requests for its
share on a socket in the folder.
"""

from __future__ import annotations

import sys
from functools import partial
from multiprocessing.connection import Listener

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from recipe.async_pipeline.verl_bridge.workers.fsdp_shards import TrainingRanks, part_of
from recipe.async_pipeline.weight_sync.memory.arena import ArenaReader, ArenaWriter
from recipe.async_pipeline.weight_sync.memory.board import await_announcement
from recipe.async_pipeline.weight_sync.memory.manifest import WeightTicket, encode
from recipe.async_pipeline.weight_sync.memory.segment_names import PREFIX, SHM_DIR
from tests import HANG_S
from tests.fakes.forked_ranks import fork_ranks
from tests.fakes.sharded_model import VERSIONS, make_model, train

BUCKET_BYTES = 512


def serve(listener: Listener, ticket: WeightTicket) -> None:
    """Answer requests for this host's share of one version until a client asks for the next."""
    reader, found = ArenaReader(), await_announcement(ticket, HANG_S)
    while True:
        with listener.accept() as client:
            what, *arguments = client.recv()
            if what == "next":
                return
            if what == "ticket":
                client.send(ticket)
            elif what == "announced":
                client.send(encode(found))
            elif what == "bucket":
                client.send(bytes(reader.bucket(found, *arguments).numpy()))
            elif what == "files":
                client.send(sorted(path.name for path in SHM_DIR.glob(f"{PREFIX}*")))


def run_rank(rank: int, *, host: int, hosts: int, count: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=count)
    mesh = init_device_mesh("cpu", (count,))
    model = make_model()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    ranks = TrainingRanks(f"host {host}")
    assert (ranks.hosts, ranks.rank) == (hosts, rank % (count // hosts))
    writer = ArenaWriter(BUCKET_BYTES, 4, torch.bfloat16, ranks)
    listener = Listener(f"{folder}/host-{host}", backlog=16) if ranks.rank == 0 else None
    for version in range(VERSIONS):
        train(model, version)
        ticket = writer.gather_parts(version, [part_of(*named) for named in model.state_dict().items()])
        assert (ticket is None) == (listener is None)
        if ticket is not None and listener is not None:
            serve(listener, ticket)
        dist.barrier()
    writer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    host, hosts, count = map(int, sys.argv[1:4])
    of_host = count // hosts
    run = partial(run_rank, host=host, hosts=hosts, count=count, folder=sys.argv[4])
    printed = fork_ranks(run, range(host * of_host, (host + 1) * of_host))
    sys.exit("".join(printed.values()) or None)
