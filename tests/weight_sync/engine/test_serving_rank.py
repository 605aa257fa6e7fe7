# SPDX-License-Identifier: Apache-2.0
"""When served weights may be overwritten, and in which mode; the tests of adapters have the loads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipe.async_pipeline.errors import WeightSyncError
from recipe.async_pipeline.weight_sync.engine.engine_adapter import Delivered
from recipe.async_pipeline.weight_sync.engine.serving_rank import OpenTime, ServingRank, StagingBoard
from recipe.async_pipeline.weight_sync.memory.arena import ArenaWriter
from recipe.async_pipeline.weight_sync.memory.board import await_manifest
from recipe.async_pipeline.weight_sync.memory.manifest import BucketEntry, Manifest, encode, over_nodes
from tests import HANG_S
from tests.fakes.adapter_contract import PIECE_BYTES, order_of_loads
from tests.fakes.engine import FakeEngine, weights
from tests.fakes.simulated_device import DEVICE, simulated_device
from tests.fakes.waiting import until

SECOND = torch.device(DEVICE.type, 1)
"""Not the current device."""


@pytest.fixture
def publish() -> Iterator[Callable[[int], bytes]]:
    writer = ArenaWriter(1 << 12, 1000, None)
    yield lambda version: encode(await_manifest(writer.gather(version, weights(version).items()), HANG_S))
    writer.close()


@pytest.fixture(autouse=True)
def board(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A board that ends with the test instead of with the process."""
    with closing(StagingBoard()) as made:
        monkeypatch.setattr(
            "recipe.async_pipeline.weight_sync.engine.serving_rank.StagingBoard", lambda: made
        )
        yield


def test_the_device_is_synchronized_once_before_each_commit(
    publish: Callable[[int], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the loader, by its recorded copies, and from the standby copy."""
    engine = FakeEngine()
    rank, order = ServingRank(engine), order_of_loads(engine, monkeypatch)
    for version in (1, 2):
        rank.load(publish(version), PIECE_BYTES)
    staged = publish(3)
    assert rank.stage(staged) is not None
    until(lambda: engine.staged_version() == 3, "staged")
    assert order == ["synchronize", "commit"] * 2, "a staging must not wait for the engine's steps"
    report, share = rank.load(staged, PIECE_BYTES)
    assert order == ["synchronize", "commit"] * 3
    assert report.tensors_proved == len(weights(3)) and share is None


def test_steps_of_the_ranks_device_end_before_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """On all its streams; neither the current device nor a current stream is the rank's."""
    with simulated_device() as device:
        there = torch.zeros(4, device=SECOND)
        read = torch.ones(4)
        with torch.cuda.stream(torch.cuda.Stream(SECOND)):
            read.copy_(there, non_blocking=True)

        def commit(described: Manifest, piece_bytes: int) -> Delivered:
            assert not any(stream.pending for stream in device.all_streams()), "a step still reads weights"
            raise WeightSyncError("enough")

        engine = FakeEngine()
        engine.device = SECOND
        monkeypatch.setattr(engine, "commit", commit)
        with pytest.raises(WeightSyncError, match="enough"):
            ServingRank(engine).load(encode(Manifest(1, (), (), ())), PIECE_BYTES)
    assert read.sum() == 0


def test_weights_that_an_engine_loads_in_inference_mode_can_be_written_outside_of_it(
    publish: Callable[[int], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, modes = FakeEngine(), set()
    rank, seal = ServingRank(engine), engine.seal

    def noting_mode() -> None:
        modes.add((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
        seal()

    monkeypatch.setattr(engine, "seal", noting_mode)
    with torch.inference_mode():
        rank.load(publish(1), PIECE_BYTES)
    rank.load(publish(2), PIECE_BYTES)
    assert modes == {(False, False)}


@pytest.mark.parametrize("node", [0, 1])
def test_a_rank_maps_the_segments_on_its_node(node: int, monkeypatch: pytest.MonkeyPatch) -> None:
    mapped: list[str] = []

    def published(described: Manifest) -> dict[str, torch.Tensor]:
        mapped.extend(bucket.segment for bucket in described.buckets)
        raise WeightSyncError("enough")

    engine = FakeEngine()
    monkeypatch.setattr(engine, "published", published)
    nodes = [Manifest(1, (), (BucketEntry(f"of node {one}", 0, 0),), ()) for one in range(2)]
    with pytest.raises(WeightSyncError, match="enough"):
        ServingRank(engine, node=node).load(encode(over_nodes(nodes)), PIECE_BYTES)
    assert mapped == [f"of node {node}"]


def test_requests_that_overlap_count_once_and_taking_splits_one_that_is_open() -> None:
    time = OpenTime()
    time.begin(1.0)
    time.begin(2.0)
    time.end(3.0)
    assert time.take(4.0) == 3.0
    time.end(6.0)
    time.begin(10.0)
    assert time.take(10.5) == 2.5
    assert time.take(10.5) == 0.0


def test_an_end_without_a_beginning_is_refused() -> None:
    with pytest.raises(ValueError, match="none was open"):
        OpenTime().end(1.0)


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), max_size=12),
    st.sets(st.integers(0, 80), max_size=4),
)
def test_whatever_overlaps_the_union_is_counted(spans: list[tuple[int, int]], asked: set[int]) -> None:
    time, total = OpenTime(), 0.0
    moments = [(begin, 1) for begin, _ in spans] + [(begin + length, 0) for begin, length in spans]
    for moment, kind in sorted([*moments, *((at, 2) for at in asked)], key=lambda m: (m[0], m[1] == 0)):
        if kind == 2:
            total += time.take(float(moment))
        elif kind == 1:
            time.begin(float(moment))
        else:
            time.end(float(moment))
    assert total + time.take(100.0) == len(
        {at for begin, length in spans for at in range(begin, begin + length)}
    )
