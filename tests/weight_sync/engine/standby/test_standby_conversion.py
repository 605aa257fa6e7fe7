# SPDX-License-Identifier: Apache-2.0
"""Converted tensors take the places of published ones in a load, once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from recipe.async_pipeline.weight_sync.engine.standby.standby_conversion import (
    Converted,
    StandbyConversion,
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
