# SPDX-License-Identifier: Apache-2.0
"""SGLang's own models and loaders on one rank of several, without the other ranks and without an engine.

Run as a program with a folder, it checks the contract of adapters for each model and prints its name: what
SGLang needs on a CPU stays in that process.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
from peft import LoraConfig, get_peft_model

from recipe.async_pipeline.errors import ProofError, WeightSyncError
from recipe.async_pipeline.verl_bridge.rollout.sglang import cpu_stubs
from recipe.async_pipeline.verl_bridge.workers.fsdp_shards import adapter_of, described, part_of
from recipe.async_pipeline.weight_sync.engine.standby import Named
from recipe.async_pipeline.weight_sync.memory.arena import ArenaWriter
from recipe.async_pipeline.weight_sync.memory.board import await_manifest
from recipe.async_pipeline.weight_sync.proof.map_check import check_map
from tests import HANG_S
from tests.fakes import checkpoints
from tests.fakes.adapter_contract import check_loads, check_stages, prove_first
from tests.fakes.engine_trees import TREE
from tests.fakes.simulated_device import DEVICE, SimulatedDevice, simulated_device

CASES = [
    (name, size)
    for name in ("qwen2-tied", "qwen3-untied", "llama", "qwen3-moe", "phi3-fused")
    for size in (1, 2, 4)
]
ADAPTERS = [(name, size) for name in ("qwen2-tied", "llama") for size in (1, 2, 4)]
JOINED = [("deepseek-v2-joined", size) for size in (1, 2)]
"""SGLang's loader keeps the tensors that it joins until both have come."""
ON_A_DEVICE = [("qwen2-tied", 2)]
RANK, ALPHA = 4, 12
"""Of the adapters. The pool has room for larger ones."""
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
            cpu_group=None,
            device_group=None,
        )

    groups = dict.fromkeys(("_TP", "_ATTN_TP", "_MOE_TP"), group(rank, size))
    groups |= dict.fromkeys(("_ATTN_CP", "_MOE_DP", "_MOE_EP", "_PP"), group(0, 1))
    with patch.multiple(parallel_state, **groups), _in_context(groups):
        yield


def _call(function: Callable[..., object], *arguments: Any) -> None:
    """Call a function that takes fewer arguments in some versions."""
    function(*arguments[: len(inspect.signature(function).parameters)])


@contextmanager
def _in_context(groups: Mapping[str, Any]) -> Iterator[None]:
    """Tell the ranks and groups to versions of SGLang that keep them in a context of the process too."""
    try:
        from sglang.srt.runtime_context import ParallelContext, get_parallel
    except ImportError:
        yield
        return
    values = {f"{name.strip('_').lower()}_group": group for name, group in groups.items()}
    values |= {name.replace("_group", "_rank"): group.rank for name, group in values.items()}
    values |= {"attn_dp_rank": 0, "dp_rank": 0}
    known = {
        name: value for name, value in values.items() if isinstance(vars(ParallelContext).get(name), property)
    }
    with get_parallel().override(**known):
        yield


def make_rank(
    folder: Path,
    rank: int,
    size: int,
    renamed: Mapping[str, str],
    *,
    lora: bool = False,
    simulated: SimulatedDevice | None = None,
) -> Any:
    """Return the adapter of one rank of a model that SGLang built; its loader confuses `renamed` tensors.

    `lora`: of an engine that serves LoRA adapters. `simulated`: the device that its weights are on.
    """
    from sglang.srt import server_args
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.moe.utils import initialize_moe_config
    from sglang.srt.model_loader.utils import get_model_architecture

    from recipe.async_pipeline.verl_bridge.rollout.sglang.adapter import SGLangAdapter

    class Rank(SGLangAdapter):
        def load(self, pieces: Iterable[Sequence[Named]]) -> None:
            with as_rank(rank, size):
                super().load(
                    [(renamed.get(name, name), tensor) for name, tensor in piece] for piece in pieces
                )

        def published(self, manifest: Any) -> dict[str, torch.Tensor]:
            found = super().published(manifest)
            return {name: found[renamed.get(name, name)] for name in found} if lora else found

    # Nothing is computed, and gpt-oss refuses the attention that runs on a CPU.
    attention = (
        "triton" if "GptOss" in (folder / "config.json").read_text(encoding="utf-8") else "torch_native"
    )
    arguments = server_args.ServerArgs(
        str(folder), device="cpu", dtype="float32", tp_size=size, attention_backend=attention
    )
    server_args.set_global_server_args_for_scheduler(arguments)
    config = ModelConfig.from_server_args(arguments)
    torch.set_default_dtype(torch.float32)
    with as_rank(rank, size):
        _call(initialize_dp_attention, arguments, config)
        _call(initialize_moe_config, arguments)
        if attention == "triton":
            # As on a GPU: the loader for CPUs cannot pad the biases of gpt-oss.
            experts = importlib.import_module("sglang.srt.layers.moe.fused_moe_triton.layer")
            experts.FusedMoE.use_padded_loading = False
        model = get_model_architecture(config)[0](config=config.hf_config)
    model.requires_grad_(False)
    for parameter in model.parameters():
        parameter.data.normal_()
    device = torch.device("cpu")
    if simulated is not None:
        device = torch.device(DEVICE.type, rank)
        simulated.adopt([*model.parameters(), *model.buffers()], rank)
    if not lora:
        return Rank(model, device)

    with as_rank(rank, size):
        manager = lora_manager(model, config, arguments, rank, size)
    return Rank(model, device, manager)


def lora_manager(model: Any, config: Any, arguments: Any, rank: int, size: int) -> Any:
    """Return SGLang's manager of LoRA adapters, as an engine makes it."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.lora.lora_manager import LoRAManager

    from recipe.async_pipeline.verl_bridge.rollout.sglang.arguments import CPU_ARGUMENTS, SLOTS
    from recipe.async_pipeline.verl_bridge.rollout.sglang.lora import target_modules

    # It is only logged, and newer versions ask a device that is simulated for it.
    vars(sys.modules[LoRAManager.__module__])["get_available_gpu_memory"] = lambda *device: 0.0
    ranks = {"tp_size": size, "tp_rank": rank}
    taken = inspect.signature(LoRAManager).parameters.keys() & ranks.keys()  # else from its groups
    return LoRAManager(
        model,
        config.hf_config,
        SLOTS,
        LoadConfig(),
        torch.float32,
        arguments,
        CPU_ARGUMENTS["lora_backend"],
        max_lora_rank=2 * RANK,
        target_modules=set(target_modules("all-linear")),
        **{name: ranks[name] for name in taken},
    )


@cache
def _install_stubs() -> None:
    cpu_stubs.install()
    if os.environ.get(TREE):
        # Newer versions import kernels by name that this machine has not; nothing is computed.
        importlib.import_module("sglang")  # installs the stubs again
        sys.modules["sgl_kernel"] = MagicMock(__path__=[], __spec__=ModuleSpec("sgl_kernel", None))
    cpu_stubs.without_pinning()


def checkpoint_name(name: str) -> str:
    """Return the name in a checkpoint that SGLang loads, for models with pictures the older one."""
    return name.replace("model.visual.", "visual.").replace("model.language_model.", "model.")


def ranks_of(folder: Path, size: int) -> list[Any]:
    """Return the adapters of a replica."""
    _install_stubs()
    return [make_rank(folder, rank, size, {}) for rank in range(size)]


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
        explained = check_map(last, rank.commit(last, 1 << 20)).coverage.tensors
        assert explained == len(last.tensors), f"the tables explain {explained} tensors"
    with pytest.raises(ProofError, match="self_attn.o_proj.weight"):
        prove_first(replica(SWAPPED), version())


def check_on_a_device(name: str, size: int, folder: Path, publish: Callable[..., Any]) -> None:
    """Weights and adapters reach a device by copies only, and are proved there."""
    model, trained = checkpoints.make(name, folder), iter(range(100))
    adapter, config = adapters(name, folder)
    with simulated_device() as simulated:

        def ranks(*, lora: bool) -> list[Any]:
            made = [make_rank(folder, rank, size, {}, lora=lora, simulated=simulated) for rank in range(size)]
            assert all(tensor.is_cuda for one in made for tensor in one.tensors().values())
            return made

        whole = ranks(lora=False)
        check_loads(whole, (publish(checkpoints.train(model, next(trained))) for _ in range(3)))
        check_stages(whole, *(publish(checkpoints.train(model, next(trained))) for _ in range(2)))
        served = ranks(lora=True)
        check_loads(served, (publish(adapter(), config) for _ in range(3)))
        last = publish(adapter(), config)
        held = [one.commit(last, 1 << 20).tensors.values() for one in served]
        assert all(tensor.is_cuda for of_rank in held for tensor in of_rank)


def adapters(name: str, folder: Path) -> tuple[Callable[[], dict[str, torch.Tensor]], str]:
    """Return what draws the tensors of an adapter, by peft's names, and its configuration."""
    wrapped = get_peft_model(
        checkpoints.make(name, folder), LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear")
    )
    trained = iter(range(100))

    def draw() -> dict[str, torch.Tensor]:
        torch.manual_seed(next(trained))
        return {name: torch.randn_like(tensor) for name, tensor in adapter_of(wrapped).items()}

    return draw, described(wrapped.peft_config["default"])


def check_adapters(name: str, size: int, folder: Path, publish: Callable[..., Any]) -> None:
    """Adapters are proved, and replace each other; one whose matrices were confused is a ProofError."""
    adapter, config = adapters(name, folder)

    def version() -> Any:
        return publish(adapter(), config)

    def replica(renamed: Mapping[str, str]) -> list[Any]:
        return [make_rank(folder, rank, size, renamed, lora=True) for rank in range(size)]

    ranks = replica({})
    check_loads(ranks, (version() for _ in range(3)))
    assert not any(rank.prepare(version()) for rank in ranks), "adapters are loaded at the commit"
    gate, up = (f"base_model.model.model.layers.1.mlp.{part}_proj.lora_B.weight" for part in ("gate", "up"))
    with pytest.raises(ProofError, match="is served with values other than the published ones"):
        prove_first(replica({gate: up, up: gate}), version())
    if size == 1:
        scaled = json.dumps({**json.loads(config), "use_rslora": True})
        with pytest.raises(WeightSyncError, match="has use_rslora=True, which SGLang does not apply"):
            prove_first(ranks, publish(publish_tensors(ranks, version()), scaled))


def publish_tensors(ranks: Sequence[Any], version: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in ranks[0].published(version).items()}


def main(folder: Path) -> None:
    _install_stubs()
    writer, versions = ArenaWriter(1 << 20, 1000, None), iter(range(1, 1000))

    def publish(weights: dict[str, torch.Tensor], config: str | None = None) -> Any:
        parts = [part_of(name, tensor) for name, tensor in weights.items()]
        ticket = writer.gather_parts(next(versions), parts, config)
        assert ticket is not None
        return await_manifest(ticket, HANG_S)

    try:
        for name, size in CASES:
            check(name, size, folder / name, publish)
            sys.stdout.write(f"{name} on {size}\n")
        for name, size in JOINED:
            model, ranks = checkpoints.make(name, folder / name), ranks_of(folder / name, size)
            check_loads(ranks, (publish(checkpoints.train(model, number)) for number in range(2)))
            sys.stdout.write(f"{name} on {size}\n")
        for name, size in ADAPTERS:
            check_adapters(name, size, folder / name, publish)
            sys.stdout.write(f"adapters of {name} on {size}\n")
        for name, size in ON_A_DEVICE:
            check_on_a_device(name, size, folder / name, publish)
            sys.stdout.write(f"{name} on {size} with a device\n")
    finally:
        writer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
