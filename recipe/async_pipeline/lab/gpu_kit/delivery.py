# SPDX-License-Identifier: Apache-2.0
"""Deliver weights from FSDP2 ranks to a served model, with torch alone: gather, stage, commit and proof.

    python -m recipe.async_pipeline.lab.gpu_kit.delivery --device cuda --ranks 2 --json FILE

Each rank copies its shards into host memory. The first rank loads every version into a model that joins
queries, keys and values in one matrix, as engines do, and proves it; a load that leaves a tensor out must be
refused. The published tensors are compared with the trained ones bit by bit.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ...errors import ProofError
from ...weight_sync.engine.recording_adapter import RecordingAdapter
from ...weight_sync.hosts.shares import T
from ...weight_sync.memory.arena import ArenaReader, ArenaWriter, HeldBlock
from ...weight_sync.memory.board import await_manifest
from ...weight_sync.memory.manifest import Manifest
from ...weight_sync.proof.proof import Prover

LAYERS = 8
WIDTHS = {"cuda": 2048, "cpu": 128}
BUCKET_BYTES, PIECE_BYTES = 256 << 20, 128 << 20
PROOF_TENSORS = 16
VERSIONS = 4
"""The first is loaded by the loader and recorded, later ones are staged."""
WAIT_S = 120.0


class ProjectionBlock(nn.Module):
    """The projections of a layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (
            nn.Linear(width, size, bias=False) for size in (width, width // 4, width // 4)
        )
        self.o = nn.Linear(width, width, bias=False)
        self.norm = nn.LayerNorm(width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normal = self.norm(hidden)
        keys = self.k(normal) + self.v(normal)
        mixed: torch.Tensor = self.o(self.q(normal) + keys.repeat(1, 4))
        return mixed


class DeliveryModel(nn.Module):
    """Layers that are sharded one by one, as training engines do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ProjectionBlock(width) for _ in range(LAYERS))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return hidden


class DeliveryRanks:
    """All ranks of this host; see `weight_sync.hosts.shares`."""

    hosts = 1

    def __init__(self) -> None:
        self.rank = dist.get_rank()

    def share(self, value: T) -> T:
        shared = [value]
        dist.broadcast_object_list(shared, src=0)
        return shared[0]

    def all(self, value: T) -> list[T]:
        values = [value] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        dist.barrier()


class DeliveryEngine(RecordingAdapter):
    """An engine of one rank, whose layers join three projections."""

    def __init__(self, width: int, device: torch.device, left_out: str | None = None) -> None:
        super().__init__(device)
        self._left_out = left_out
        self._rows = {"q": (0, width), "k": (width, width // 4), "v": (width + width // 4, width // 4)}
        self._tensors: dict[str, torch.Tensor] = {}
        for layer in range(LAYERS):
            shapes = {"qkv": (width * 3 // 2, width), "o.weight": (width, width), "norm.weight": (width,)}
            for name, shape in (shapes | {"norm.bias": (width,)}).items():
                self._tensors[f"layers.{layer}.{name}"] = torch.zeros(
                    shape, dtype=torch.bfloat16, device=device
                )

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self._tensors

    def load(self, pieces: Iterable[Sequence[tuple[str, torch.Tensor]]]) -> None:
        for name, tensor in chain.from_iterable(pieces):
            if name == self._left_out:
                continue
            layer, _, projection = name.removesuffix(".weight").rpartition(".")
            if projection in self._rows:
                start, size = self._rows[projection]
                self._tensors[f"{layer}.qkv"].narrow(0, start, size).copy_(tensor)
            else:
                self._tensors[name].copy_(tensor)

    def finish(self) -> None:
        """There is nothing to do."""

    def seal(self) -> None:
        """There is nothing to do."""


def part_of(name: str, weight: torch.Tensor) -> HeldBlock:
    """Return the block of a tensor that this rank holds."""
    assert isinstance(weight, DTensor), name
    shape = tuple(weight.shape)
    _, offset = compute_local_shape_and_global_offset(shape, weight.device_mesh, weight.placements)
    return HeldBlock(name, shape, weight.dtype, tuple(offset), weight.to_local().detach())


class Delivery:
    """One rank's part of the deliveries; the first rank also serves."""

    def __init__(self, device: torch.device, width: int) -> None:
        self.rank, self.device, self.width = dist.get_rank(), device, width
        torch.manual_seed(0)
        self.model = DeliveryModel(width).to(device, torch.bfloat16)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.writer = ArenaWriter(BUCKET_BYTES, PROOF_TENSORS, None, DeliveryRanks())
        self.served, self.prover = DeliveryEngine(width, device), Prover()
        self.seconds: dict[str, list[float]] = {"gather": [], "stage": [], "commit": [], "prove": []}
        self.proved = self.different = 0
        self.num_bytes = 0

    def version(self, version: int) -> Manifest | None:
        """Change the weights, publish them and serve them. Returns the manifest on the first rank."""
        with torch.no_grad():
            for weight in self.model.parameters():
                weight.add_(1.0 + version)
        state = self.model.state_dict()
        ticket = self.writer.gather_parts(version, [part_of(*named) for named in state.items()])
        manifest = None
        if ticket is not None:
            manifest = await_manifest(ticket, WAIT_S)
            self.seconds["gather"].append(ticket.gather_s)
            self.num_bytes = ticket.num_bytes
            self._serve(manifest)
        self._compare(state, manifest)
        return manifest

    def _serve(self, manifest: Manifest) -> None:
        ended = threading.Event()
        started = time.perf_counter()
        if self.served.prepare(manifest, lambda error: ended.set()):
            if not ended.wait(WAIT_S):
                raise TimeoutError(
                    f"the copy of v{manifest.version} to the device did not end in {WAIT_S:g} s"
                )
            self.seconds["stage"].append(time.perf_counter() - started)
        self._commit(self.served, manifest)

    def _commit(self, served: DeliveryEngine, manifest: Manifest) -> None:
        started = time.perf_counter()
        with torch.no_grad():
            delivered = served.commit(manifest, PIECE_BYTES)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        committed = time.perf_counter()
        self.proved += self.prover.prove(manifest, delivered, lambda: served.published(manifest)).tensors
        self.seconds["commit"].append(committed - started)
        self.seconds["prove"].append(time.perf_counter() - committed)

    def _compare(self, state: Mapping[str, Any], manifest: Manifest | None) -> None:
        """Count published tensors that differ from the trained ones. A collective."""
        published = {} if manifest is None else ArenaReader().tensors(manifest)
        for name, weight in state.items():
            whole = weight.full_tensor().cpu()
            self.different += manifest is not None and not torch.equal(whole, published[name])

    def sabotage(self, manifest: Manifest | None) -> str | None:
        """Load without one tensor; return the refusal. Raises AssertionError if the load is accepted."""
        if manifest is None:
            return None
        try:
            self.prover = Prover()
            self._commit(DeliveryEngine(self.width, self.device, f"layers.{LAYERS - 1}.k.weight"), manifest)
        except ProofError as error:
            return str(error)
        raise AssertionError("a load that left a tensor out was accepted")

    def results(self) -> Iterator[tuple[str, Any]]:
        yield "ranks", dist.get_world_size()
        yield "megabytes", round(self.num_bytes / 1e6, 1)
        yield "tensors_proved", self.proved
        yield "tensors_different", self.different
        for name, seconds in self.seconds.items():
            if seconds:
                yield f"{name}_s", min(seconds)


def run_rank(rank: int, ranks: int, device_type: str, width: int, folder: str) -> None:
    """Run one rank; the first one writes `result.json` into the folder."""
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device(device_type)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    meet = f"file://{folder}/meet"
    dist.init_process_group(backend, init_method=meet, rank=rank, world_size=ranks)
    delivery = Delivery(device, width)
    try:
        manifest = None
        for version in range(VERSIONS):
            manifest = delivery.version(version)
        found = dict(delivery.results())
        found["refused"] = delivery.sabotage(manifest)
        dist.barrier()
    finally:
        delivery.writer.close()
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def main(arguments: Sequence[str]) -> int:
    """Run all ranks. Returns 1 if a published tensor differs from the trained one, else 0."""
    parser = argparse.ArgumentParser(prog="gpu_kit.delivery")
    parser.add_argument("--device", choices=tuple(WIDTHS), default="cuda")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(
            run_rank, (args.ranks, args.device, WIDTHS[args.device], folder), nprocs=args.ranks
        )
        text = Path(folder, "result.json").read_text(encoding="utf-8")
    args.json.write_text(text + "\n", encoding="utf-8")
    return 1 if json.loads(text)["tensors_different"] else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
