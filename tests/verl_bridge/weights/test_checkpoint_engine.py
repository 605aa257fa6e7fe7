# SPDX-License-Identifier: Apache-2.0
"""The engine under verl's own protocol: prepare, topology, send and receive, finalize."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from recipe.async_pipeline.errors import WeightSyncError
from recipe.async_pipeline.weight_sync.memory.board import await_manifest
from recipe.async_pipeline.weight_sync.memory.segment_names import PREFIX, SHM_DIR, new_name
from tests import HANG_S
from tests.conftest import Load

pytestmark = pytest.mark.real_engine
BUCKET = 4096


class Engines:
    """Makes engines and closes them."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind
        self.made: list[Any] = []

    def make(self, *, is_master: bool = False, timeout_s: float = HANG_S) -> Any:
        engine = self.kind(BUCKET, is_master=is_master, timeout_s=timeout_s)
        self.made.append(engine)
        return engine


@pytest.fixture
def engines(load: Load) -> Iterator[Engines]:
    made = Engines(
        load("recipe.async_pipeline.verl_bridge.weights.checkpoint_engine").DualBufferCheckpointEngine
    )
    yield made
    for engine in made.made:
        engine.close()
    left = [path.name for path in SHM_DIR.glob(f"{PREFIX}*") if str(os.getpid()) in path.name]
    assert left == [], "nothing stays in shared memory"


def weights(version: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(version)
    return {
        "a": torch.randn(5, 3, generator=draw),
        "big": torch.randn(3000, generator=draw),
        "n": torch.arange(4),
    }


async def collect(engine: Any, version: int) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() async for name, tensor in engine.receive_weights(version)}


def test_verl_finds_it_by_name(engines: Engines, load: Load) -> None:
    registry = load("verl.checkpoint_engine.base").CheckpointEngineRegistry
    assert registry.get("dual_buffer") is engines.kind


def connect(kind: Any, trainers: list[Any], receivers: list[Any]) -> Path:
    """Do what verl's manager does before each version, and return the path of the board."""
    metadata = [engine.prepare() for engine in (*trainers, *receivers)]
    topology = kind.build_topology(len(trainers), len(receivers), metadata)
    for some, arguments in zip((trainers, receivers), topology, strict=True):
        for i, engine in enumerate(some):
            engine.init_process_group(**{name: values[i] for name, values in arguments.items()})
    board: str = topology[0]["board"][0]
    return SHM_DIR / board


async def transfer(trainers: list[Any], receivers: list[Any], version: int) -> list[dict[str, torch.Tensor]]:
    waiting = [asyncio.create_task(collect(engine, version)) for engine in receivers]
    await asyncio.sleep(0)
    for engine in trainers:
        await engine.send_weights(((n, t) for n, t in weights(version).items()), version)
    return list(await asyncio.gather(*waiting))


def test_two_trainer_ranks_send_versions_to_two_replicas(engines: Engines) -> None:
    trainers = [engines.make(is_master=True), engines.make()]
    receivers = [engines.make(), engines.make()]
    for version in (1, 2, 3):
        board = connect(engines.kind, trainers, receivers)
        assert not board.exists(), "the ticket of the previous version must not be read again"
        for received in asyncio.run(transfer(trainers, receivers, version)):
            assert list(received) == list(weights(version))
            for name, tensor in weights(version).items():
                expected = tensor.bfloat16() if tensor.is_floating_point() else tensor
                assert torch.equal(received[name], expected)
        assert stat.S_IMODE(board.stat().st_mode) == 0o600
        for engine in (*trainers, *receivers):
            engine.finalize()
        assert not board.exists()


def test_the_master_returns_the_ticket(engines: Engines) -> None:
    ticket = engines.make(is_master=True).gather(iter(weights(0).items()), 7)
    manifest = await_manifest(ticket, HANG_S)
    assert manifest.version == 7
    assert [(e.name, e.dtype) for e in manifest.tensors] == [
        ("a", "bfloat16"),
        ("big", "bfloat16"),
        ("n", "int64"),
    ]


def test_other_ranks_take_part_in_the_collectives_and_return_nothing(engines: Engines) -> None:
    source = iter(weights(0).items())
    assert engines.make().gather(source, 0) is None
    assert list(source) == [], "every parameter was materialised"


def test_a_version_is_gathered_once(engines: Engines) -> None:
    master = engines.make(is_master=True)
    master.gather(iter(weights(0).items()), 3)
    with pytest.raises(WeightSyncError, match="versions only move forward"):
        master.gather(iter(weights(0).items()), 3)


def test_a_receiver_has_a_deadline(engines: Engines) -> None:
    receiver = engines.make(timeout_s=0.01)
    receiver.init_process_group(board=new_name())
    with pytest.raises(WeightSyncError, match="published no weights within 0.01 s"):
        asyncio.run(collect(receiver, 0))


def test_receiving_requires_a_board(engines: Engines) -> None:
    with pytest.raises(WeightSyncError, match="receive_weights before init_process_group"):
        asyncio.run(collect(engines.make(), 0))
