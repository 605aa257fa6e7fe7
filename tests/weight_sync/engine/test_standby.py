# SPDX-License-Identifier: Apache-2.0
"""Converted tensors take the places of published ones in a load, once."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

from recipe.async_pipeline.errors import WeightSyncError
from recipe.async_pipeline.weight_sync.engine.copy_plan import RecordedLoad, Recorder
from recipe.async_pipeline.weight_sync.engine.standby import (
    Converted,
    StandbyConversion,
    StandbyCopy,
    replaced,
)
from recipe.async_pipeline.weight_sync.memory.arena import ArenaReader, ArenaWriter
from recipe.async_pipeline.weight_sync.memory.board import await_manifest
from recipe.async_pipeline.weight_sync.memory.manifest import Manifest
from tests import HANG_S

CPU = torch.device("cpu")


@pytest.fixture
def writer() -> Iterator[ArenaWriter]:
    made = ArenaWriter(1 << 12, 2, None)
    yield made
    made.close()


def publish(writer: ArenaWriter, version: int) -> tuple[Manifest, dict[str, torch.Tensor]]:
    weights = {"a": torch.full((2,), float(version)), "b": torch.ones(2)}
    manifest = await_manifest(writer.gather(version, weights.items()), HANG_S)
    return manifest, dict(ArenaReader().tensors(manifest))


def halved(published: Mapping[str, torch.Tensor]) -> Converted:
    """As a quantized weight: other values and a scale."""
    return {"a": [("a", published["a"] / 2), ("a_scale", torch.tensor(2.0))]}


def test_a_version_is_converted_and_taken_once(writer: ArenaWriter) -> None:
    standby, ends = StandbyConversion(halved, CPU), list[Any]()
    for version in (1, 2):
        standby.begin(*publish(writer, version), ends.append)
        standby.join()
        assert standby.version() == version
    converted = standby.take()
    assert converted["a"][0][1].tolist() == [1.0, 1.0] and ends == [None, None]
    assert standby.version() is None and standby.take() == {}


def test_the_error_of_a_conversion_is_raised(writer: ArenaWriter) -> None:
    def fails(published: Mapping[str, torch.Tensor]) -> Converted:
        raise ValueError("no such kernel")

    standby, ends = StandbyConversion(fails, CPU), list[Any]()
    standby.begin(*publish(writer, 1), ends.append)
    standby.join()
    with pytest.raises(ValueError, match="no such kernel"):
        standby.version()
    assert isinstance(ends[0], ValueError)


def test_only_converted_tensors_are_replaced() -> None:
    a, b, c = (torch.tensor(float(number)) for number in range(3))
    assert replaced([("a", a), ("b", b)], {"a": [("a", c), ("a_scale", b)]}) == [
        ("a", c),
        ("a_scale", b),
        ("b", b),
    ]
    assert replaced([("a", a)], {}) == [("a", a)]


class Model(torch.nn.Module):
    """Two linear layers that share a weight, and a padded one."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(4, 4, bias=False)
        self.tied = torch.nn.Linear(4, 4, bias=False)
        self.tied.weight = self.a.weight
        self.b = torch.nn.Linear(4, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.b(self.tied(self.a(x)))
        return out


class Bench:
    """A served model, the recording of its first load, and versions to come."""

    def __init__(self) -> None:
        self.writer = ArenaWriter(1 << 12, 2, None)
        self.model = Model().requires_grad_(False)
        self.reader = ArenaReader()
        manifest, published = self.publish(0)
        with torch.no_grad(), Recorder(published) as recorder:
            self.load_plainly(self.model, published)
        recorded = recorder.recorded(manifest, published)
        assert recorded is not None
        self.load = recorded

    def weights(self, version: int) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(version)
        return {"a": torch.randn(4, 4, generator=draw), "b": torch.randn(5, 4, generator=draw)}

    @staticmethod
    def load_plainly(model: Model, published: Mapping[str, torch.Tensor]) -> None:
        model.a.weight.data.copy_(published["a"])
        # A view of a view, as vLLM's loaders make them.
        model.b.weight.data.narrow(0, 0, 5).copy_(published["b"])
        model.b.weight[5:].data.fill_(0)

    def publish(self, version: int) -> tuple[Manifest, dict[str, torch.Tensor]]:
        manifest = await_manifest(self.writer.gather(version, self.weights(version).items()), HANG_S)
        return manifest, self.reader.tensors(manifest)

    def check_serves(self, version: int) -> None:
        wanted = Model().requires_grad_(False)
        self.load_plainly(wanted, self.weights(version))
        x = torch.ones(4)
        assert torch.equal(self.model(x), wanted(x))
        assert self.model.tied.weight is self.model.a.weight


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.writer.close()


@pytest.mark.parametrize("may_exchange", [True, False])
def test_what_is_committed_is_served_and_not_before(bench: Bench, may_exchange: bool) -> None:
    standby = StandbyCopy(bench.load, bench.model.parameters(), may_exchange=may_exchange)
    for version in range(1, 6):
        standby.begin(*bench.publish(version))
        standby.join()
        assert standby.version() == version
        bench.check_serves(version - 1)
        standby.commit()
        bench.check_serves(version)
        assert standby.version() is None


@pytest.mark.parametrize("may_exchange", [True, False])
def test_memory_is_exchanged_only_if_it_may_be(bench: Bench, may_exchange: bool) -> None:
    standby = StandbyCopy(bench.load, bench.model.parameters(), may_exchange=may_exchange)
    addresses = []
    for version in range(1, 4):
        standby.begin(*bench.publish(version))
        standby.join()
        standby.commit()
        addresses.append([p.data_ptr() for p in bench.model.parameters()])
    if may_exchange:
        assert addresses[0] == addresses[2]
        assert not set(addresses[0]) & set(addresses[1]), "all of it"
    else:
        assert addresses[0] == addresses[1] == addresses[2]


def test_memory_that_something_else_refers_to_stays_where_it_is(bench: Bench) -> None:
    kept = bench.model.b.weight.data[2:]
    standby = StandbyCopy(bench.load, bench.model.parameters(), may_exchange=True)
    before = {name: p.data_ptr() for name, p in bench.model.named_parameters()}
    standby.begin(*bench.publish(1))
    standby.join()
    standby.commit()
    bench.check_serves(1)
    after = {name: p.data_ptr() for name, p in bench.model.named_parameters()}
    assert after["b.weight"] == before["b.weight"]
    assert after["a.weight"] != before["a.weight"]
    assert torch.equal(kept[:3], bench.weights(1)["b"][2:])


def test_a_load_without_it_continues_where_it_stopped(bench: Bench) -> None:
    standby = StandbyCopy(bench.load, bench.model.parameters(), may_exchange=True)
    for version in range(1, 7):
        manifest, published = bench.publish(version)
        assert bench.load.fits(manifest, bench.model.parameters())
        if version % 3:
            standby.begin(manifest, published)
            standby.join()
            standby.commit()
        else:
            bench.load.copy(manifest, published, bench.load.targets)
        bench.check_serves(version)


def test_a_version_that_was_never_committed_is_written_over(bench: Bench) -> None:
    standby = StandbyCopy(bench.load, bench.model.parameters(), may_exchange=True)
    standby.begin(*bench.publish(1))
    standby.begin(*bench.publish(2))
    standby.join()
    assert standby.version() == 2
    standby.commit()
    bench.check_serves(2)


class Held(RecordedLoad):
    """Its copies wait for the test, and may fail."""

    def __init__(self, load: RecordedLoad) -> None:
        self.__dict__.update(load.__dict__)
        self.go, self.error = threading.Event(), False
        self.fails_on: int | None = None

    def copy(
        self,
        manifest: Manifest,
        published: Any,
        targets: Sequence[torch.Tensor],
        *,
        background: bool = False,
    ) -> None:
        assert background, "the engine generates meanwhile"
        assert self.go.wait(HANG_S)
        if self.error or manifest.version == self.fails_on:
            raise WeightSyncError("the device is full")
        super().copy(manifest, published, targets, background=background)


def test_it_is_not_there_before_it_is_whole(bench: Bench) -> None:
    held = Held(bench.load)
    standby = StandbyCopy(held, bench.model.parameters(), may_exchange=True)
    assert standby.version() is None
    standby.begin(*bench.publish(1))
    assert standby.version() is None
    held.go.set()
    standby.join()
    assert standby.version() == 1


def test_a_newer_version_replaces_one_that_is_being_copied_without_waiting_for_it(bench: Bench) -> None:
    held = Held(bench.load)
    held.fails_on = 1
    standby = StandbyCopy(held, bench.model.parameters(), may_exchange=True)
    ends: list[tuple[int, int | None, BaseException | None]] = []

    def begin(version: int) -> None:
        standby.begin(*bench.publish(version), lambda error: ends.append((version, standby.version(), error)))

    begin(1)
    begin(2)
    assert standby.version() is None, "the first one is still being copied"
    held.go.set()
    standby.join()
    assert [(version, there) for version, there, _ in ends] == [(1, None), (2, 2)]
    assert isinstance(ends[0][2], WeightSyncError) and ends[1][2] is None
    standby.commit()
    bench.check_serves(2)


def test_an_error_of_the_copy_reaches_the_caller_and_the_next_version_is_accepted(bench: Bench) -> None:
    held = Held(bench.load)
    held.error = True
    held.go.set()
    standby = StandbyCopy(held, bench.model.parameters(), may_exchange=True)
    standby.begin(*bench.publish(1))
    standby.join()
    with pytest.raises(WeightSyncError, match="the device is full"):
        standby.version()
    held.error = False
    standby.begin(*bench.publish(2))
    standby.join()
    standby.commit()
    bench.check_serves(2)
