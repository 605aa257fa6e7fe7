# SPDX-License-Identifier: Apache-2.0
"""vLLM's own block-scaled fp8 models on one rank of several, loaded as the real adapter loads them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from verl.utils.vllm.vllm_quant_utils import apply_vllm_quant_patches
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading

from recipe.async_pipeline.verl_bridge.rollout.served_tensors import served_tensors
from recipe.async_pipeline.verl_bridge.rollout.vllm.block_fp8 import BlockFp8
from recipe.async_pipeline.verl_bridge.rollout.vllm.layout import served_layout
from recipe.async_pipeline.weight_sync.engine.engine_adapter import Computed, Expected
from recipe.async_pipeline.weight_sync.engine.recording_adapter import RecordingAdapter
from recipe.async_pipeline.weight_sync.engine.standby.standby_conversion import Convert, Named
from recipe.async_pipeline.weight_sync.memory.manifest import TensorEntry
from tests.fakes.vllm_models import as_rank, config_of

QUANTIZED = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
    "ignored_layers": [],
}
"""What verl's server asks of vLLM with `rollout.quantization=fp8`."""


class Fp8Rank(RecordingAdapter):
    """An adapter of a quantized model that vLLM built."""

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        super().__init__(torch.device("cpu"))
        apply_vllm_quant_patches()
        self.rank, self.size = rank, size
        quantized = {"quantization": "fp8", "hf_overrides": {"quantization_config": QUANTIZED}}
        self.config = config_of(folder, size, dtype="bfloat16", **quantized)
        with pytest.MonkeyPatch.context() as patched, self._here():
            # The kernel is chosen while the model is built; no product is computed here.
            patched.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
            self.model: torch.nn.Module = initialize_model(self.config)
            process_weights_after_loading(self.model, self.config.model_config, torch.device("cpu"))
        self.model.requires_grad_(False)
        for tensor in self.tensors().values():
            tensor.view(torch.uint8).fill_(1)
        self._table = served_layout(self.model)
        runner = SimpleNamespace(model=self.model, vllm_config=self.config)
        fp8 = BlockFp8.of(runner, self._table)
        assert fp8 is not None
        self._fp8 = fp8

    def move(self, device: torch.device, adopt: Callable[[Iterable[torch.Tensor]], None]) -> None:
        """Have the weights in the memory of a device, which adopts them."""
        self.device = device
        adopt(self.tensors().values())

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

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return dict(served_tensors(self.model))

    def begin(self) -> None:
        self._fp8.begin()

    def convert_piece(self, piece: Sequence[Named]) -> Sequence[Named]:
        return self._fp8.convert_piece(piece, self.device)

    def load(self, pieces: Iterable[Sequence[Named]]) -> None:
        with self._here():
            for piece in pieces:
                self._fp8.load(piece)

    def finish(self) -> None:
        pass

    def computed(self) -> Sequence[Computed]:
        return self._fp8.computed(self._layout, self.tensors())

    def conversion(self) -> Convert | None:
        return self._fp8.conversion(self.device)

    def seal(self) -> None:
        with self._here():
            self._fp8.end()

    def expected(self, entry: TensorEntry) -> Expected | None:
        return self._table.expected(entry)
