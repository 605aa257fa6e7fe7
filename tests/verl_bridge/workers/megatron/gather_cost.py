# SPDX-License-Identifier: Apache-2.0
"""Time the gather of a model of 100 M parameters on two Megatron ranks, and the assembled one.

Arguments: FOLDER UPDATES. Prints one JSON object for each layout: seconds that the ranks spend in a gather,
by this package's plan and by Megatron-Bridge's export, in turns; and the names of tensors that differ.
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests import HANG_S
from tests.verl_bridge.workers.megatron import layouts, tiny_models

LAYOUTS = {
    "dense-tp2": layouts.Layout("qwen3", 2, layouts.parallel(tensor=2)),
    "moe-ep2": layouts.Layout("qwen3_moe", 2, layouts.parallel(expert=2)),
}
SIZES = {
    "vocab_size": 16384,
    "hidden_size": 768,
    "head_dim": 64,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
}
EXPERTS = {"num_experts": 8, "moe_intermediate_size": 512, "num_hidden_layers": 7}
BUCKET_BYTES = 512 << 20
SKIPPED = 2
"""First gathers of each way, which touch the two arenas for the first time."""

LIMIT_S = 1200.0
"""Most of it for cores that others use too."""


def measure(updates: int, folder: Path, name: str, layout: layouts.Layout) -> dict[str, Any]:
    """Return what one rank measured."""
    gathers = Gathers(layouts.Check(folder, name, layout).engine)
    started = time.perf_counter()
    gathers.plan()
    plan_s = time.perf_counter() - started

    different: set[str] = set()
    for version in range(updates + SKIPPED):
        gathers.train(version)
        different |= gathers.differing(gathers.in_turns(version))
        dist.barrier()
    gathers.close()
    timed = {way: of_way[SKIPPED:] for way, of_way in gathers.seconds.items()}
    return {
        "layout": name,
        "parameters_of_rank": sum(parameter.numel() for parameter in gathers.parameters()),
        "different": sorted(different),
        "plan_s": plan_s,
        "seconds": timed,
        "ratio": statistics.median(timed["parts"]) / statistics.median(timed["export"]),
    }


class Gathers:
    """Both ways of one rank, each with its own arenas."""

    def __init__(self, engine: Any) -> None:
        from recipe.async_pipeline.verl_bridge.workers.fsdp_shards import TrainingRanks
        from recipe.async_pipeline.weight_sync.memory.arena import ArenaWriter

        self.engine, self.ranks = engine, TrainingRanks("this host")
        self._parts = ArenaWriter(BUCKET_BYTES, 16, torch.float32, self.ranks)
        self._whole = ArenaWriter(BUCKET_BYTES, 16, torch.float32)
        self.seconds: dict[str, list[float]] = {"parts": [], "export": []}

    def parameters(self) -> Iterator[torch.Tensor]:
        return (parameter for module in self.engine.module for parameter in module.parameters())

    def train(self, version: int) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(1e-3 * (1 + version))

    def plan(self) -> list[Any]:
        from recipe.async_pipeline.verl_bridge.workers.shards import held_by

        held = held_by(self.engine)
        assert held is not None
        return held.parts

    def in_turns(self, version: int) -> dict[str, Any]:
        """Gather both ways; return their tickets, on the first rank."""
        tickets = {}
        for way, gather in (("parts", self.by_parts), ("export", self.by_export)):
            dist.barrier()
            started = time.perf_counter()
            tickets[way] = gather(version)
            dist.barrier()
            self.seconds[way].append(time.perf_counter() - started)
        return tickets

    def by_parts(self, version: int) -> Any:
        return self._parts.gather_parts(version, self.plan())

    def by_export(self, version: int) -> Any:
        from recipe.async_pipeline.verl_bridge.workers.shards import assembled

        weights = assembled(self.engine).weights
        if self.ranks.rank == 0:
            return self._whole.gather(version, weights)
        for _ in weights:
            pass
        return None

    def differing(self, tickets: dict[str, Any]) -> set[str]:
        """Return the tensors that the two ways published differently, once their checksums are computed."""
        from recipe.async_pipeline.weight_sync.memory.arena import ArenaReader
        from recipe.async_pipeline.weight_sync.memory.board import await_manifest

        if self.ranks.rank != 0:
            return set()
        readers = {way: ArenaReader() for way in tickets}
        read = {way: readers[way].tensors(await_manifest(ticket, HANG_S)) for way, ticket in tickets.items()}
        parts, export = read["parts"], read["export"]
        odd = set(parts.keys() ^ export.keys())
        return odd | {
            name for name in parts.keys() & export.keys() if not torch.equal(parts[name], export[name])
        }

    def close(self) -> None:
        self._parts.close()
        self._whole.close()


def main(folder: Path, updates: int) -> int:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    layouts.import_stack()
    tiny_models.make("qwen3", folder, **SIZES)
    tiny_models.make("qwen3_moe", folder, **SIZES | EXPERTS)
    failed = 0
    for name, layout in LAYOUTS.items():
        failed += layouts.run_ranks(folder, name, layout, partial(measure, updates), LIMIT_S)
        if not failed:
            sys.stdout.write((folder / f"{name}.0.json").read_text(encoding="utf-8") + "\n")
    return failed


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), int(sys.argv[2])))
