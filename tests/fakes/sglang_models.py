# SPDX-License-Identifier: Apache-2.0
"""SGLang's own models and loaders on one rank of several, without the other ranks and without an engine.

Run as a program with a folder, it checks the contract of adapters for each model and prints its name: what
SGLang needs on a CPU stays in that process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from recipe.async_pipeline.errors import ProofError
from recipe.async_pipeline.verl_bridge.rollout.sglang import cpu_stubs
from recipe.async_pipeline.weight_sync.arena import ArenaWriter
from recipe.async_pipeline.weight_sync.board import await_manifest
from recipe.async_pipeline.weight_sync.map_check import check_map
from tests.fakes import checkpoints
from tests.fakes.adapter_contract import check_loads, check_stages, prove_first

CASES = [
    (name, size)
    for name in ("qwen2-tied", "qwen3-untied", "llama", "qwen3-moe", "phi3-fused")
    for size in (1, 2, 4)
]
FIRST, SECOND = (f"model.layers.{layer}.self_attn.o_proj.weight" for layer in (0, 1))
SWAPPED = {FIRST: SECOND, SECOND: FIRST}


@contextmanager
def as_rank(rank: int, size: int) -> Iterator[None]:
    """Let SGLang believe that this process is one rank of tensor parallelism."""
    from sglang.srt.distributed import parallel_state

    def group(rank: int, size: int) -> Any:
        return SimpleNamespace(
            rank_in_group=rank,
            world_size=size,
            rank=rank,
            is_first_rank=rank == 0,
            is_last_rank=rank == size - 1,
        )

    groups = dict.fromkeys(("_TP", "_ATTN_TP", "_MOE_TP"), group(rank, size))
    groups |= dict.fromkeys(("_ATTN_CP", "_MOE_DP", "_MOE_EP", "_PP"), group(0, 1))
    with patch.multiple(parallel_state, **groups):
        yield


def make_rank(folder: Path, rank: int, size: int, renamed: Mapping[str, str]) -> Any:
    """Return the adapter of one rank of a model that SGLang built; its loader confuses `renamed` tensors."""
    from sglang.srt import server_args
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.moe.utils import initialize_moe_config
    from sglang.srt.model_loader.utils import get_model_architecture

    from recipe.async_pipeline.verl_bridge.rollout.sglang.adapter import SGLangAdapter

    class Rank(SGLangAdapter):
        def load(self, piece: Sequence[tuple[str, torch.Tensor]]) -> None:
            with as_rank(rank, size):
                super().load([(renamed.get(name, name), tensor) for name, tensor in piece])

    arguments = server_args.ServerArgs(
        str(folder), device="cpu", dtype="float32", tp_size=size, attention_backend="torch_native"
    )
    server_args.set_global_server_args_for_scheduler(arguments)
    config = ModelConfig.from_server_args(arguments)
    torch.set_default_dtype(torch.float32)
    with as_rank(rank, size):
        initialize_dp_attention(arguments, config)
        initialize_moe_config(arguments)
        model = get_model_architecture(config)[0](config=config.hf_config)
    model.requires_grad_(False)
    for parameter in model.parameters():
        parameter.data.normal_()
    return Rank(model, torch.device("cpu"))


def check(name: str, size: int, folder: Path, publish: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Versions are proved, loaded and staged; a load that confuses two tensors is a ProofError."""
    model, trained = checkpoints.make(name, folder), iter(range(100))

    def version() -> Any:
        return publish(checkpoints.train(model, next(trained)))

    def replica(renamed: Mapping[str, str]) -> list[Any]:
        return [make_rank(folder, rank, size, renamed) for rank in range(size)]

    ranks = replica({})
    check_loads(ranks, (version() for _ in range(3)))
    check_stages(ranks, version(), version())
    last = version()
    for rank in ranks:
        by_name = check_map(last, rank.commit(last, 1 << 20)).by_name
        experts = sum(".mlp.experts." in entry.name for entry in last.tensors)
        assert by_name == len(last.tensors) - experts, f"the tables explain {by_name} tensors"
    with pytest.raises(ProofError, match="self_attn.o_proj.weight"):
        prove_first(replica(SWAPPED), version())


def main(folder: Path) -> None:
    cpu_stubs.install()
    writer, versions = ArenaWriter(1 << 20, 1000, None), iter(range(1, 1000))

    def publish(weights: dict[str, torch.Tensor]) -> Any:
        return await_manifest(writer.gather(next(versions), weights.items()), 30)

    try:
        for name, size in CASES:
            check(name, size, folder / name, publish)
            sys.stdout.write(f"{name} on {size}\n")
    finally:
        writer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
