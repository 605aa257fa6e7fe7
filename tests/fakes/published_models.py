# SPDX-License-Identifier: Apache-2.0
"""Tiny models that are trained a step for each version, and published through an arena."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from recipe.async_pipeline.weight_sync.memory.arena import ArenaWriter
from recipe.async_pipeline.weight_sync.memory.board import await_manifest
from recipe.async_pipeline.weight_sync.memory.manifest import Manifest
from tests import HANG_S
from tests.conftest import Load

Weights = dict[str, torch.Tensor]


class PublishedModels:
    """The models of a test module, each made once."""

    def __init__(self, load: Load, folder: Path) -> None:
        self._checkpoints, self._ranks = load("tests.fakes.checkpoints"), load("tests.fakes.vllm_models")
        self._folder = folder
        self._made: dict[str, Any] = {}
        self._writer = ArenaWriter(1 << 20, 1000, None)
        self._version = 0

    def published(self, name: str) -> Weights:
        if name not in self._made:
            self._made[name] = self._checkpoints.make(name, self._folder / name)
        self._version += 1
        trained: Weights = self._checkpoints.train(self._made[name], self._version)
        return trained

    def publish(self, weights: Weights) -> Manifest:
        self._version += 1
        return await_manifest(self._writer.gather(self._version, weights.items()), HANG_S)

    def close(self) -> None:
        self._writer.close()
