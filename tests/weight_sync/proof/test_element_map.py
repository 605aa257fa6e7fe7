# SPDX-License-Identifier: Apache-2.0
"""Views of tensors are found, narrowed and joined as torch does it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.async_pipeline.weight_sync.proof.element_map import Piece, View, missing_element, overlap

CUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all": lambda t: t,
    "rows": lambda t: t[2:5],
    "columns": lambda t: t[:, 1:3],
    "box": lambda t: t[1:4, 2:],
    "transposed": lambda t: t.t(),
    "every other row": lambda t: t[::2],
    "one element": lambda t: t[3, 2],
    "one row": lambda t: t[3],
    "none": lambda t: t[2:2],
    "three axes": lambda t: t.view(3, 2, 4)[:, 1:],
    "expanded": lambda t: t[:1].expand(1, 4),
}


def numbered() -> torch.Tensor:
    return torch.arange(24).view(6, 4)


def view_of(tensor: torch.Tensor) -> View:
    return View(tensor.storage_offset(), tuple(tensor.shape), tensor.stride())


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_a_view_finds_its_elements(cut: Callable[[torch.Tensor], torch.Tensor]) -> None:
    part = cut(numbered())
    view, everything = view_of(part), np.arange(24)
    held, index = view.find(everything)
    assert everything[held].tolist() == sorted(part.reshape(-1).tolist())
    if view.shape and held.any():
        assert [int(part[tuple(i)]) for i in np.stack(index, axis=1)] == everything[held].tolist()
        assert view.at(index).tolist() == everything[held].tolist()
    assert torch.equal(view.of(numbered()), part)
    assert view.one_to_one and view.numel == part.numel()
    assert view.contiguous == part.is_contiguous()
    assert set(view.corners().tolist()) <= set(part.reshape(-1).tolist())


def test_a_repeated_element_is_not_one_to_one() -> None:
    assert not view_of(torch.arange(4).expand(3, 4)).one_to_one
    assert not view_of(torch.arange(9).as_strided((3, 4), (2, 1))).one_to_one


def test_views_of_views_agree_with_torch() -> None:
    whole = numbered().view(3, 2, 4)
    assert view_of(numbered()).split(0, (3, 2)) == view_of(whole)
    assert view_of(whole).exchanged() == view_of(whole.transpose(-2, -1))
    assert view_of(whole).exchanged(0, 1) == view_of(whole.transpose(0, 1))
    assert view_of(whole).narrow(2, 1, 2) == view_of(whole.narrow(2, 1, 2))
    assert view_of(whole).select(0, 2) == view_of(whole.select(0, 2))


def test_a_piece_leads_from_published_to_served_positions() -> None:
    published, served = numbered(), torch.zeros(4, 10, dtype=torch.long)
    target = served.t()[4:10]
    target.copy_(published)
    piece = Piece(view_of(published), "served", view_of(target))
    held, places = piece.places(np.array([0, 7, 23, 99]))
    assert held.tolist() == [True, True, True, False]
    assert served.view(-1)[torch.from_numpy(places)].tolist() == [0, 7, 23]


@given(st.lists(st.sampled_from(sorted(CUTS)), max_size=4))
def test_coverage_and_overlap_agree_with_sets(names: list[str]) -> None:
    parts = [CUTS[name](numbered()) for name in names]
    views, elements = [view_of(part) for part in parts], [e for p in parts for e in p.reshape(-1).tolist()]
    lost = missing_element(views, View.whole((6, 4)))
    assert (lost is None) == (set(elements) == set(range(24)))
    assert lost is None or lost not in elements
    assert overlap(views) == (len(set(elements)) < len(elements))


def test_the_gap_of_a_tensor_that_is_not_contiguous() -> None:
    transposed = numbered().t()
    assert missing_element([view_of(numbered())], view_of(transposed)) is None
    assert missing_element([view_of(numbered()[:5])], view_of(transposed)) in range(20, 24)


@st.composite
def parts_of_rows(draw: st.DrawFn) -> tuple[View, list[View]]:
    """A tensor, and parts of it, mostly of its columns as tensor parallel ranks have them."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    whole, views = View.whole(shape), []
    for _ in range(draw(st.integers(1, 4))):
        view = whole
        for axis in draw(st.sets(st.integers(0, len(shape) - 1), max_size=2)):
            start = draw(st.integers(0, shape[axis] - 1))
            view = view.narrow(axis, start, draw(st.integers(1, shape[axis] - start)))
        order = draw(st.permutations(range(len(shape))))
        shapes, strides = ([of[axis] for axis in order] for of in (view.shape, view.stride))
        views.append(View(view.offset, tuple(shapes), tuple(strides)))
    return whole, views


@settings(max_examples=200, deadline=None, database=None, derandomize=True)
@given(parts_of_rows())
def test_a_missing_element_is_the_first_one_that_no_view_marks(found: tuple[View, list[View]]) -> None:
    whole, views = found
    marks = torch.zeros(whole.numel, dtype=torch.bool)
    for view in views:
        view.of(marks).fill_(True)
    unmarked = (~marks).nonzero().flatten().tolist()
    assert missing_element(views, whole) == (unmarked[0] if unmarked else None)


def test_columns_of_a_large_tensor_are_compared_without_its_elements() -> None:
    whole = View.whole((1 << 20, 1 << 20))  # marks of its elements would take 1 TB
    ranks = [whole.narrow(1, rank << 17, 1 << 17) for rank in range(8)]
    assert missing_element(ranks, View.whole((whole.numel,))) is None
    assert missing_element([*ranks[:3], *ranks[4:]], View.whole((whole.numel,))) == 3 << 17
