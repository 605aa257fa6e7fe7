# SPDX-License-Identifier: Apache-2.0
"""vLLM's own models and loaders on one rank of several, without the other ranks and without an engine."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from verl.workers.rollout.vllm_rollout.utils import VLLM_LORA_INT_ID
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading

from recipe.async_pipeline.verl_bridge.rollout.served_parts import served_tensors
from recipe.async_pipeline.verl_bridge.rollout.vllm.adapter import keep_weights_unpacked
from recipe.async_pipeline.verl_bridge.rollout.vllm.layout import served_layout
from recipe.async_pipeline.verl_bridge.rollout.vllm.server import ON_DEVICE
from recipe.async_pipeline.weight_sync.engine.engine_adapter import Conversion, Expected
from recipe.async_pipeline.weight_sync.engine.recording_adapter import RecordingAdapter
from recipe.async_pipeline.weight_sync.engine.standby import Named
from recipe.async_pipeline.weight_sync.memory.manifest import TensorEntry


class Group(SimpleNamespace):
    """As much of a process group as models and loaders ask for."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(
            rank_in_group=rank,
            rank=rank,
            world_size=size,
            is_first_rank=rank == 0,
            is_last_rank=rank == size - 1,
            device_group=SimpleNamespace(size=lambda: size, rank=lambda: rank),
            device_communicator=None,
        )


@contextmanager
def as_rank(rank: int, size: int) -> Iterator[None]:
    """Let vLLM believe that this process is one rank of tensor and expert parallelism."""
    with pytest.MonkeyPatch.context() as patched:
        for name in ("_TP", "_EP"):
            patched.setattr(parallel_state, name, Group(rank, size))
        for name in ("_PP", "_DP", "_PCP", "_DCP"):
            patched.setattr(parallel_state, name, Group(0, 1))
        yield


def config_of(folder: Path, size: int, **more: Any) -> Any:
    """Return vLLM's configuration of a model on `size` ranks; `more`: other arguments of an engine."""
    if hasattr(EngineArgs, ON_DEVICE):  # as in a run
        more.setdefault(ON_DEVICE, False)
    return EngineArgs(
        str(folder),
        max_model_len=64,
        skip_tokenizer_init=True,
        tensor_parallel_size=size,
        distributed_executor_backend="mp",
        enforce_eager=True,
        **more,
    ).create_engine_config()


@contextmanager
def without_kernels() -> Iterator[None]:
    """Let models be built whose kernels need a GPU; nothing is computed."""
    attention = importlib.import_module("vllm.model_executor.layers.attention.mla_attention")
    experts = importlib.import_module("vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method")

    def or_else(function: Any, substitute: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            try:
                return function(*arguments, **named)
            except NotImplementedError:
                return substitute

        return call

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(attention, "get_mla_prefill_backend", MagicMock())
        patched.setattr(attention, "get_attn_backend", or_else(attention.get_attn_backend, MagicMock()))
        select, triton = "select_unquantized_moe_backend", (experts.UnquantizedMoeBackend.TRITON, None)
        patched.setattr(experts, select, or_else(getattr(experts, select), triton))
        described = importlib.import_module("vllm.model_executor.layers.fused_moe.config").FusedMoEConfig
        patched.setattr(described, "__post_init__", or_else(described.__post_init__, None))
        yield


class ModelRank(RecordingAdapter):
    """An adapter of a model that vLLM built, with vLLM's loader and the tables of the real adapter."""

    def __init__(self, folder: Path, rank: int, size: int, *, experts_apart: bool = False) -> None:
        super().__init__(torch.device("cpu"))
        keep_weights_unpacked()
        self.rank, self.size = rank, size
        with without_kernels():
            self.config = config_of(folder, size, dtype="float32", enable_expert_parallel=experts_apart)
        with set_current_vllm_config(self.config), as_rank(rank, size), without_kernels():
            self.model: torch.nn.Module = initialize_model(self.config)
        self.model.requires_grad_(False)
        for parameter in self.model.parameters():
            parameter.data.normal_()
        self._table = served_layout(self.model)

    def start(self) -> None:
        """Prepare the weights as an engine does at its start."""
        with set_current_vllm_config(self.config), as_rank(self.rank, self.size):
            process_weights_after_loading(self.model, self.config.model_config, self.device)

    def move(self, device: torch.device, adopt: Callable[[Iterable[torch.Tensor], int], None]) -> None:
        """Have the weights in the memory of a device, which adopts them."""
        self.device = device
        adopt(self.tensors().values(), device.index)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return dict(served_tensors(self.model))

    def load(self, pieces: Iterable[Sequence[Named]]) -> None:
        model: Any = self.model
        with set_current_vllm_config(self.config), as_rank(self.rank, self.size):
            every = chain.from_iterable(pieces)
            model.load_weights(named for named in every if not self._table.is_alias(named[0]))

    def finish(self) -> None:
        pass

    def seal(self) -> None:
        pass

    def expected(self, entry: TensorEntry) -> Expected | None:
        return self._table.expected(entry)

    def converted(self) -> Mapping[str, Conversion]:
        return self._table.converted


class DrafterRank(ModelRank):
    """One rank of MiMo's drafter: one more layer, with an embedding and a head, and vLLM's mapper for it."""

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        super().__init__(folder, rank, size)
        drafter = importlib.import_module("vllm.model_executor.models.mimo_mtp")
        self.config.model_config.hf_config.num_nextn_predict_layers = 1
        with set_current_vllm_config(self.config), as_rank(rank, size):
            self.model = drafter.MiMoMTP(vllm_config=self.config)
        self.model.requires_grad_(False)
        for parameter in self.model.parameters():
            parameter.data.normal_()
        self._table = served_layout(self.model)


def drafter_weights(one_rank: DrafterRank) -> dict[str, torch.Tensor]:
    """What a trainer publishes of the drafter, by the names of its checkpoint."""
    weights = {}
    layers = one_rank.config.model_config.hf_config.num_hidden_layers
    for name, served in one_rank.model.named_parameters():
        published = name.replace(f"mtp_layers.{layers}.", "mtp_layers.0.").replace(".mtp_block.", ".")
        for fused, parts in {"qkv_proj": ("q", "k", "v"), "gate_up_proj": ("gate", "up")}.items():
            if fused in published:
                rows = one_rank.model.get_submodule(name.rpartition(".")[0]).output_sizes
                for part, size in zip(parts, rows, strict=True):  # type: ignore[arg-type]
                    weights[published.replace(fused, f"{part}_proj")] = torch.randn(size, *served.shape[1:])
                break
        else:
            weights[published] = torch.randn(served.shape)
    return weights


def checkpoint_name(name: str) -> str:
    """Return the name in a checkpoint that vLLM loads: transformers' own."""
    return name


def ranks_of(folder: Path, size: int) -> list[ModelRank]:
    """Return the adapters of a replica."""
    return [ModelRank(folder, rank, size) for rank in range(size)]


class AdapterRank:
    """As much of a worker of vLLM as serves a LoRA adapter: the attention layers of one rank."""

    def __init__(self, folder: Path, rank: int, size: int, largest: int) -> None:
        from vllm.config.lora import LoRAConfig
        from vllm.lora.layers import MergedQKVParallelLinearWithLoRA, RowParallelLinearWithLoRA

        self.device = torch.device("cpu")
        self._rank, self._size = rank, size
        built = ModelRank(folder, rank, size)
        self.vllm_config = built.config
        config = LoRAConfig(max_lora_rank=largest, max_loras=1, lora_dtype=torch.float32)
        self._layers: dict[str, Any] = {}
        kinds = {"qkv_proj": MergedQKVParallelLinearWithLoRA, "o_proj": RowParallelLinearWithLoRA}
        with set_current_vllm_config(built.config), as_rank(rank, size):
            for name, module in built.model.named_modules():
                kind = kinds.get(name.rpartition(".")[2])
                if kind is not None:
                    self._layers[name] = layer = kind(module)
                    layer.create_lora_weights(1, config, built.config.model_config.hf_config)
        adapters = SimpleNamespace(
            lora_index_to_id=[VLLM_LORA_INT_ID],
            modules=self._layers,
            packed_modules_mapping={"qkv_proj": ["q_proj", "k_proj", "v_proj"]},
            lora_config=config,
        )
        self.model_runner = SimpleNamespace(
            model=built.model,
            vllm_config=built.config,
            lora_manager=SimpleNamespace(_adapter_manager=adapters),
        )

    def remove_lora(self, number: int) -> None:
        pass

    def add_lora(self, request: Any) -> None:
        """Give each layer its part, as vLLM's manager does."""

        def matrices(name: str, kind: str) -> Any:
            parent, _, own = name.rpartition(".")
            parts = ["q_proj", "k_proj", "v_proj"] if own == "qkv_proj" else [own]
            names = [f"base_model.model.{parent}.{part}.lora_{kind}.weight" for part in parts]
            scaling = request.peft_config["lora_alpha"] / request.peft_config["r"] if kind == "B" else 1
            found = [request.lora_tensors[one] * scaling for one in names]
            return found if len(found) > 1 else found[0]

        with set_current_vllm_config(self.vllm_config), as_rank(self._rank, self._size):
            for name, layer in self._layers.items():
                layer.set_lora(0, matrices(name, "A"), matrices(name, "B"))
