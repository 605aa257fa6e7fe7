# SPDX-License-Identifier: Apache-2.0
"""A copy beside the engine: whole or not there, and its errors reach whoever asks."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from recipe.async_pipeline.errors import WeightSyncError
from recipe.async_pipeline.weight_sync.arena import ArenaReader, ArenaWriter
from recipe.async_pipeline.weight_sync.manifest import Manifest
from recipe.async_pipeline.weight_sync.stage import Stage

WEIGHTS = {"a": torch.arange(12.0).reshape(3, 4), "b": torch.ones(5)}
CPU = torch.device("cpu")


@pytest.fixture
def writer() -> Iterator[ArenaWriter]:
    made = ArenaWriter(1 << 12, 2, None)
    yield made
    made.close()


def test_what_is_staged_is_the_version_and_outlives_the_arena(writer: ArenaWriter) -> None:
    stage = Stage(ArenaReader(), writer.gather(7, WEIGHTS.items()), CPU)
    stage.join()
    assert stage.version() == 7
    for version in (8, 9):  # both arenas are written again
        writer.gather(version, ((name, tensor * 0) for name, tensor in WEIGHTS.items()))
    assert all(torch.equal(tensor, WEIGHTS[name]) for name, tensor in stage.tensors)
    assert [name for name, _ in stage.tensors] == list(WEIGHTS)


class Slow(ArenaReader):
    """Its tensors can be read when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def read(self, manifest: Manifest, piece_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
        for piece in super().read(manifest, piece_bytes):
            yield [(name, Waiting(tensor, self.go)) for name, tensor in piece]  # type: ignore[misc]


class Waiting:
    """A tensor whose copy takes until `go`, and that cannot be copied if it is empty."""

    def __init__(self, tensor: torch.Tensor, go: threading.Event) -> None:
        self.tensor, self.go = tensor, go

    def to(self, device: torch.device, copy: bool) -> torch.Tensor:
        assert self.go.wait(timeout=30)
        if self.tensor.numel() == 0:
            raise WeightSyncError("the device is full")
        return self.tensor.to(device, copy=copy)


def test_it_is_not_there_before_it_is_whole(writer: ArenaWriter) -> None:
    reader = Slow()
    stage = Stage(reader, writer.gather(1, WEIGHTS.items()), CPU)
    assert stage.version() is None
    reader.go.set()
    stage.join()
    assert stage.version() == 1


def test_an_error_of_the_copy_reaches_whoever_asks(writer: ArenaWriter) -> None:
    reader = Slow()
    reader.go.set()
    stage = Stage(reader, writer.gather(1, [("empty", torch.zeros(0)), *WEIGHTS.items()]), CPU)
    stage.join()
    with pytest.raises(WeightSyncError, match="the device is full"):
        stage.version()
