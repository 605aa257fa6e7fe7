# SPDX-License-Identifier: Apache-2.0
"""vLLM's own block-scaled fp8 models on one rank of several, loaded as the real adapter loads them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from verl.utils.vllm.vllm_quant_utils import apply_vllm_quant_patches
from vllm import _custom_ops
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading

from recipe.async_pipeline.verl_bridge.rollout.vllm.adapter import VllmAdapter
from recipe.async_pipeline.weight_sync.engine.standby import Named
from tests.fakes.vllm_models import as_rank, config_of

QUANTIZED = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
    "ignored_layers": [],
}
"""What verl's server asks of vLLM with `rollout.quantization=fp8`."""


class Fp8Rank(VllmAdapter):
    """The adapter of a quantized model that vLLM built, without vLLM's worker."""

    def __init__(self, folder: Path, rank: int, size: int, *, packed: bool = True) -> None:
        """`packed`: whether vLLM prepares the weights for its kernel, for which a CPU needs AVX-512."""
        apply_vllm_quant_patches()
        self.rank, self.size = rank, size
        quantized = {"quantization": "fp8", "hf_overrides": {"quantization_config": QUANTIZED}}
        self.config = config_of(folder, size, dtype="bfloat16", **quantized)
        with pytest.MonkeyPatch.context() as patched, self._here():
            # The kernel is chosen while the model is built; no product is computed here.
            patched.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
            patched.setattr(_custom_ops, "_supports_cpu_fp8_w8a16", True)
            model: torch.nn.Module = initialize_model(self.config)
            if packed:
                process_weights_after_loading(model, self.config.model_config, torch.device("cpu"))
        model.requires_grad_(False)
        runner = SimpleNamespace(model=model, vllm_config=self.config)
        super().__init__(SimpleNamespace(device=torch.device("cpu"), model_runner=runner))
        for tensor in self.tensors().values() if packed else ():
            tensor.view(torch.uint8).fill_(1)

    def move(self, device: torch.device, adopt: Callable[[Iterable[torch.Tensor], int], None]) -> None:
        """Have the weights in the memory of a device, which adopts them."""
        self.device = device
        adopt(self.tensors().values(), device.index)

    @contextmanager
    def _here(self) -> Iterator[None]:
        """Let vLLM and verl believe that this is the rank's process."""
        with (
            set_current_vllm_config(self.config),
            as_rank(self.rank, self.size),
            pytest.MonkeyPatch.context() as patched,
        ):
            patched.setattr(torch.distributed, "get_rank", lambda: self.rank)
            yield

    def load(self, pieces: Iterable[Sequence[Named]]) -> None:
        with self._here():
            super().load(pieces)

    def seal(self) -> None:
        with self._here():
            super().seal()
