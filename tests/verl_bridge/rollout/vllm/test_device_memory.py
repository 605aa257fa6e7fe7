# SPDX-License-Identifier: Apache-2.0
"""vLLM's own loaders and LoRA slots on a simulated device: host tensors reach it by copies only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from recipe.async_pipeline.weight_sync.memory.arena import ArenaWriter
from recipe.async_pipeline.weight_sync.memory.board import await_manifest
from recipe.async_pipeline.weight_sync.memory.manifest import Manifest
from tests import HANG_S
from tests.conftest import Load
from tests.fakes.adapter_contract import check_loads, check_stages

pytestmark = [pytest.mark.real_engine, pytest.mark.filterwarnings("default")]

SIZE = 2
"""Ranks of tensor parallelism."""


class Trainer:
    """Publishes versions of a model from the device."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._version = device, 0
        self.writer = ArenaWriter(1 << 20, 1000, torch.bfloat16)

    def publish(self, weights: dict[str, torch.Tensor], config: str | None = None) -> Manifest:
        self._version += 1
        trained = {name: tensor.detach().to(self._device) for name, tensor in weights.items()}
        return await_manifest(self.writer.gather(self._version, trained.items(), config), HANG_S)


@pytest.fixture
def trainer(load: Load) -> Iterator[Trainer]:
    simulation = load("tests.fakes.simulated_device")
    made = Trainer(simulation.DEVICE)
    yield made
    made.writer.close()


@pytest.fixture
def device(load: Load) -> Iterator[Any]:
    for name in ("vllm_models", "lora_ranks", "checkpoints"):
        load(f"tests.fakes.{name}")  # what they import asks for the machine's real devices
    with load("tests.fakes.simulated_device").simulated_device() as simulated:
        yield simulated


@pytest.mark.parametrize("name", ["qwen2-tied", "qwen3-moe", "glm4-fused"])
def test_weights_are_loaded_staged_and_proved(
    load: Load, device: Any, trainer: Trainer, tmp_path: Path, name: str
) -> None:
    checkpoints, ranks_of = load("tests.fakes.checkpoints"), load("tests.fakes.vllm_models")
    model = checkpoints.make(name, tmp_path)
    ranks = [ranks_of.ModelRank(tmp_path, rank, SIZE) for rank in range(SIZE)]
    for index, rank in enumerate(ranks):
        rank.model.to(torch.bfloat16)
        rank.move(torch.device("cuda", index), device.adopt)
    check_loads(ranks, (trainer.publish(checkpoints.train(model, number)) for number in range(3)))
    check_stages(ranks, *(trainer.publish(checkpoints.train(model, number)) for number in (3, 4)))
    for rank in ranks:
        assert {tensor.device for tensor in rank.tensors().values()} == {rank.device}


def test_adapters_are_loaded_and_proved(load: Load, device: Any, trainer: Trainer, tmp_path: Path) -> None:
    made = load("tests.fakes.lora_ranks")
    tensors, config = made.adapters_of(load("tests.fakes.checkpoints").make("llama", tmp_path))
    ranks = [made.LoraRank(tmp_path, rank, SIZE, device) for rank in range(SIZE)]

    def versions() -> Iterator[Manifest]:
        for _ in range(3):
            drawn = {key: torch.randn_like(tensor) for key, tensor in tensors.items()}
            yield trainer.publish(drawn, config)

    check_loads(ranks, versions())
    served = [rank.commit(next(versions()), 1 << 20).tensors for rank in ranks]
    assert all(tensor.is_cuda for of_rank in served for tensor in of_rank.values())
    assert not any(rank.prepare(next(versions())) for rank in ranks), "adapters are loaded at the commit"
