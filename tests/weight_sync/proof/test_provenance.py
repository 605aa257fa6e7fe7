# SPDX-License-Identifier: Apache-2.0
"""A map is learned through a loader's intermediate tensors, and only where it is one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch

from recipe.async_pipeline.weight_sync.engine.copy_plan import Recorder
from recipe.async_pipeline.weight_sync.proof.element_map import ElementMap

Weights = Mapping[str, torch.Tensor]
ROWS, COLUMNS = 6, 4


def numbered() -> dict[str, torch.Tensor]:
    """Three tensors in one memory; no number occurs twice."""
    memory = torch.arange(3 * ROWS * COLUMNS, dtype=torch.float32)
    return {name: part.view(ROWS, COLUMNS) for name, part in zip("abc", memory.chunk(3), strict=True)}


def learn(made: Callable[[Weights], torch.Tensor]) -> tuple[ElementMap, torch.Tensor]:
    published = numbered()
    target = torch.full_like(made(published), -1.0, dtype=torch.float64)
    with torch.no_grad(), Recorder(published) as recorder:
        target.copy_(made(published))
    return recorder.elements({"served": target}), target


ARRANGEMENTS: dict[str, Callable[[Weights], torch.Tensor]] = {
    "joined": lambda p: torch.cat([p["a"], p["b"]]),
    "joined columns": lambda p: torch.cat([p["a"], p["b"][:, 1:3]], dim=1),
    "stacked in order": lambda p: torch.stack([p["a"], p["b"], p["c"]]),
    "stacked in disorder": lambda p: torch.stack([p["c"], p["a"]], dim=1),
    "transposed": lambda p: p["b"].t().contiguous(),
    "transposed view": lambda p: p["b"].clone().t(),
    "cast": lambda p: p["a"].double(),
    "cast and joined": lambda p: torch.cat([p["a"].double(), p["c"].double()]).narrow(0, 3, 5),
    "selected": lambda p: p["a"][torch.tensor([4, 0, 1, 2])],
    "interleaved": lambda p: torch.stack([p["a"], p["b"]], dim=1).reshape(2 * ROWS, COLUMNS),
    "one element": lambda p: torch.cat([p["a"]])[2, 3],
}


@pytest.mark.parametrize("made", ARRANGEMENTS.values(), ids=ARRANGEMENTS)
def test_every_element_is_followed(made: Callable[[Weights], torch.Tensor]) -> None:
    elements, target = learn(made)
    published, found = numbered(), torch.full_like(target, -1.0)
    for name, pieces in elements.pieces.items():
        for piece in pieces:
            piece.target.of(found).copy_(piece.source.of(published[name]))
    assert torch.equal(found, target), "the pieces are all of the load"
    assert "the loader also ran" in elements.note


@pytest.mark.parametrize(
    "made",
    [
        lambda p: p["a"] * 2,
        lambda p: torch.cat([p["a"] + 0, p["b"]]),
        lambda p: torch.cat([p["a"], torch.zeros(1, COLUMNS)]),
        lambda p: torch.cat([p["a"].flip(0)]),
    ],
)
def test_computed_elements_are_not_in_the_map(made: Callable[[Weights], torch.Tensor]) -> None:
    assert not learn(made)[0].pieces


def test_intermediate_tensors_are_forgotten() -> None:
    published = numbered()
    with torch.no_grad(), Recorder(published) as recorder:
        for _ in range(10):
            torch.cat([published["a"]])
    assert len(recorder._provenance._numbers) <= 2
