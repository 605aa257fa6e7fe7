# SPDX-License-Identifier: Apache-2.0
"""A view is found for every rearrangement that is strided, and for nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from recipe.async_pipeline.verl_bridge.workers.megatron.element_views import ParameterView, cut, fitted

pytestmark = pytest.mark.real_engine
GROUPS, QUERIES, SIZE, HIDDEN = 3, 2, 4, 5
"""Query groups of a fused QKV weight, queries of a group, size of a head, width of the model."""
Rearrange = Callable[[torch.Tensor], torch.Tensor]


def indices(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return row and column of each element of a parameter."""
    flat = torch.arange(int(torch.tensor(shape).prod()))
    columns = flat.numel() // shape[0]
    return (flat // columns).reshape(shape), (flat % columns).reshape(shape)


def view_through(rearrange: Rearrange, shape: tuple[int, ...]) -> ParameterView | None:
    row, column = (rearrange(index) for index in indices(shape))
    return fitted(row.int(), column.int(), int(torch.tensor(shape[1:]).prod()))


def of_qkv(part: slice) -> Rearrange:
    """Return the rows of the queries, keys or values of a fused weight."""

    def rearrange(weight: torch.Tensor) -> torch.Tensor:
        groups = weight.view(GROUPS, QUERIES + 2, SIZE, *weight.shape[1:])
        return groups[:, part].reshape(-1, *weight.shape[1:])

    return rearrange


QKV = (GROUPS * (QUERIES + 2) * SIZE, HIDDEN)
REARRANGED: dict[str, tuple[Rearrange, tuple[int, ...]]] = {
    "as it is": (lambda w: w, (6, 4)),
    "one dimension": (lambda w: w, (7,)),
    "upper rows": (lambda w: w[:3], (6, 4)),
    "lower rows": (lambda w: w[3:], (6, 4)),
    "columns": (lambda w: w[:, 1:3], (6, 4)),
    "one row": (lambda w: w[2:3], (6, 4)),
    "one element": (lambda w: w[2:3, 1:2], (6, 4)),
    "transposed": (lambda w: w.T, (6, 4)),
    "every other row": (lambda w: w[::2], (6, 4)),
    "three dimensions": (lambda w: w[:, 1], (3, 2, 4)),
    "queries": (of_qkv(slice(0, QUERIES)), QKV),
    "keys": (of_qkv(slice(QUERIES, QUERIES + 1)), QKV),
    "values": (of_qkv(slice(QUERIES + 1, None)), QKV),
    "bias of queries": (of_qkv(slice(0, QUERIES)), QKV[:1]),
}


@pytest.mark.parametrize("name", REARRANGED)
def test_a_view_holds_the_rearranged_elements(name: str) -> None:
    rearrange, shape = REARRANGED[name]
    view = view_through(rearrange, shape)
    assert view is not None
    # The parameter follows others in a buffer, as in Megatron.
    values = torch.randn(11 + int(torch.tensor(shape).prod()))
    parameter = values[11:].view(shape)
    expected = rearrange(parameter)
    assert torch.equal(view.of(parameter).reshape(expected.shape), expected)
    assert view.of(parameter).untyped_storage().data_ptr() == values.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    "rearrange",
    [
        lambda w: w[torch.tensor([0, 1, 3, 2, 4, 5])],
        lambda w: w[torch.tensor([0, 1, 3])],
        lambda w: torch.cat([w[:, 1:], w[:, :1]], dim=1),
        lambda w: torch.cat([w[:3], w[3:].flip(1)]),
    ],
)
def test_other_orders_have_no_view(rearrange: Rearrange) -> None:
    assert view_through(rearrange, (6, 4)) is None


def test_a_large_tensor_is_compared_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipe.async_pipeline.verl_bridge.workers.megatron.element_views.CHUNK_ELEMENTS", 7)
    assert view_through(lambda w: w[:, :3], (50, 4)) is not None
    row, column = indices((50, 4))
    row[49, 3] = 0
    assert fitted(row, column, 4) is None, "the last element is compared too"


def test_the_block_of_this_rank_is_cut_out() -> None:
    nan = float("nan")
    tensor = torch.tensor([[nan, 3.0, 4.0], [nan, 5.0, 6.0]])
    shape, offset, numbers = cut({"w": tensor, "of others": torch.full((2,), nan)})["w"]
    assert (shape, offset) == ((2, 3), (0, 1))
    assert numbers is not None and numbers.tolist() == [[3, 4], [5, 6]]


@pytest.mark.parametrize(
    "tensor",
    [torch.tensor([[0.0, float("nan")], [float("nan"), 1.0]]), torch.tensor([0.5, 1.0])],
    ids=["not a rectangle", "blended"],
)
def test_a_mapping_that_computes_gives_no_block(tensor: torch.Tensor) -> None:
    assert cut({"w": tensor})["w"][2] is None
    assert "of others" not in cut({"of others": torch.full((2,), float("nan"))})
