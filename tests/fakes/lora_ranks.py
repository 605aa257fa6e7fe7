# SPDX-License-Identifier: Apache-2.0
"""vLLM's own LoRA layers and slots on one rank of several, behind the real adapter of the engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from verl.utils.vllm import VLLMHijack
from vllm.config import set_current_vllm_config
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.model_executor.model_loader.utils import initialize_model

from recipe.async_pipeline.verl_bridge.rollout.vllm.adapter import VllmAdapter, keep_weights_unpacked
from recipe.async_pipeline.verl_bridge.workers.fsdp_shards import adapter_of, described
from recipe.async_pipeline.weight_sync.engine.engine_adapter import Delivered
from recipe.async_pipeline.weight_sync.memory.manifest import Manifest
from tests.fakes.simulated_device import DEVICE, SimulatedDevice
from tests.fakes.vllm_models import as_rank, config_of

RANK, ALPHA = 4, 12


class LoraRank(VllmAdapter):
    """One rank of vLLM on a device, whose worker has a model and its adapters, and no engine."""

    def __init__(self, folder: Path, rank: int, size: int, device: SimulatedDevice) -> None:
        keep_weights_unpacked()
        VLLMHijack.hijack()
        self.rank, self.size = rank, size
        asked = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}
        self.config = config_of(folder, size, dtype="bfloat16", **asked)
        with set_current_vllm_config(self.config), as_rank(rank, size):
            model: torch.nn.Module = initialize_model(self.config)
            device.adopt([*model.parameters(), *model.buffers()])
            manager = LRUCacheWorkerLoRAManager(self.config, DEVICE, {})
            model = manager.create_lora_manager(model, self.config)
        runner = SimpleNamespace(model=model, vllm_config=self.config, lora_manager=manager)
        super().__init__(
            SimpleNamespace(
                device=DEVICE,
                model_runner=runner,
                add_lora=manager.add_adapter,
                remove_lora=manager.remove_adapter,
            )
        )

    def commit(self, manifest: Manifest, piece_bytes: int) -> Delivered:
        with set_current_vllm_config(self.config), as_rank(self.rank, self.size):
            return super().commit(manifest, piece_bytes)


def adapters_of(model: Any) -> tuple[dict[str, torch.Tensor], str]:
    """Return a new adapter's tensors, by peft's names, and its configuration."""
    wrapped = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear"))
    return adapter_of(wrapped), described(wrapped.peft_config["default"])
