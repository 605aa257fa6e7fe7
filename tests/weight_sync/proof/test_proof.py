# SPDX-License-Identifier: Apache-2.0
"""Values are compared bit for bit at positions that follow from version and name.

`test_engine_adapter.py` has the faults of loaders, which a proof catches.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.async_pipeline.errors import ProofError
from recipe.async_pipeline.weight_sync.engine.engine_adapter import Conversion, Delivered, Expected
from recipe.async_pipeline.weight_sync.memory.manifest import VALUES_PER_TENSOR, Manifest, TensorEntry
from recipe.async_pipeline.weight_sync.proof.element_map import ElementMap, Piece, View
from recipe.async_pipeline.weight_sync.proof.proof import (
    ROTATION,
    Prover,
    draw_sample,
    sample_positions,
    sampled_names,
    values_at,
)

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Weights = dict[str, torch.Tensor]


def manifest(weights: Weights, version: int = 1, count: int = 1000) -> Manifest:
    entries = tuple(
        TensorEntry(n, tuple(t.shape), str(t.dtype).removeprefix("torch."), 0, 0, t.nbytes)
        for n, t in weights.items()
    )
    samples = tuple(
        draw_sample(version, n, weights[n]) for n in sampled_names(tuple(weights), version, count)
    )
    return Manifest(version, entries, (), samples)


def served_as(tensors: Weights, conversions: dict[str, Conversion] | None = None) -> Delivered:
    """An engine that serves each published tensor under its name."""
    whole = {n: View(0, tuple(t.shape), t.stride()) for n, t in tensors.items()}
    pieces = {n: (Piece(View.whole(t.shape), n, whole[n]),) for n, t in tensors.items() if t.numel()}
    return Delivered(tensors, ElementMap(pieces), lambda entry: None, conversions or {})


def prove(made: Manifest, delivered: Delivered) -> int:
    return Prover().prove(made, delivered, dict).tensors


def two() -> Weights:
    draw = torch.Generator().manual_seed(1)
    return {EMBED: torch.randn(90, 16, generator=draw), "norm": torch.randn(16, generator=draw)}


# What is right passes.


def test_equal_values_are_proved() -> None:
    assert prove(manifest(two()), served_as(two())) == 2


def test_not_a_number_equals_itself() -> None:
    weights = two()
    weights["norm"].fill_(math.nan)
    prove(manifest(weights), served_as(weights))


def test_scalars_and_empty_tensors() -> None:
    weights = {"scale": torch.tensor(3.0), "none": torch.empty(0, 4)}
    assert prove(manifest(weights), served_as(weights)) == 2


def test_a_served_tensor_may_be_a_view_of_another_layout() -> None:
    weights = two()
    flat = torch.zeros(2000)
    transposed = flat[100 : 100 + 90 * 16].view(16, 90).t()
    transposed.copy_(weights[EMBED])
    prove(manifest(weights), served_as({**weights, EMBED: transposed}))
    places = np.array([0, 90, 91])
    assert torch.equal(values_at(transposed, places), flat[[100, 190, 191]])


def tied(*, explained: bool, other: bool = False) -> Delivered:
    """An engine that loads both names of a tied weight. `other`: the second one into fewer of its rows."""
    weight = two()[EMBED]
    piece = Piece(View.whole(weight.shape), EMBED, View.whole(weight.shape))
    part = Piece(View(0, (80, 16), (16, 1)), EMBED, View(0, (80, 16), (16, 1)))
    elements = ElementMap({EMBED: (part if other else piece,), HEAD: (piece,)})

    def expected(entry: TensorEntry) -> Expected | None:
        return Expected((piece,)) if explained and entry.name == HEAD else None

    return Delivered({EMBED: weight}, elements, expected)


def test_tied_weights_may_be_loaded_by_both_names_if_the_tables_explain_one() -> None:
    weights = {EMBED: two()[EMBED], HEAD: two()[EMBED]}
    assert prove(manifest(weights), tied(explained=True)) == 2
    with pytest.raises(ProofError, match=f"{EMBED} is served with an element that was loaded twice"):
        prove(manifest(weights), tied(explained=False))
    with pytest.raises(ProofError, match=EMBED):
        prove(manifest(weights), tied(explained=True, other=True))
    with pytest.raises(ProofError, match=f"{EMBED} is served with values other than the published"):
        prove(manifest({**weights, EMBED: two()[EMBED] + 1}), tied(explained=True))


# What is wrong does not.


@pytest.mark.parametrize("name", two())
def test_other_values_are_named(name: str) -> None:
    other = {**two(), name: two()[name] + 0.25}
    with pytest.raises(ProofError, match=f"v1: {name} is served with values other than the published"):
        prove(manifest(two()), served_as(other))


def test_a_lower_precision_is_an_error_unless_it_is_declared() -> None:
    weights = two()
    rounded = {name: tensor.bfloat16() for name, tensor in weights.items()}
    with pytest.raises(ProofError, match=f"{EMBED} was published as float32, but .* is served as bfloat16"):
        prove(manifest(weights), served_as(rounded))
    conversions: dict[str, Conversion] = dict.fromkeys(weights, lambda values: values.bfloat16())
    assert prove(manifest(weights), served_as(rounded, conversions)) == 2
    with pytest.raises(ProofError, match=f"{EMBED} is served with values other than the published ones"):
        prove(manifest(weights), served_as({**rounded, EMBED: rounded[EMBED] * 2}, conversions))


def test_a_conversion_must_give_the_served_dtype() -> None:
    weights = two()
    conversions: dict[str, Conversion] = dict.fromkeys(weights, lambda values: values.half())
    with pytest.raises(ProofError, match=f"{EMBED} is served as torch.float32"):
        prove(manifest(weights), served_as(weights, conversions))


def test_no_comparison_is_no_proof() -> None:
    made = manifest(two())
    empty = Manifest(made.version, made.tensors, (), ())
    with pytest.raises(ProofError, match="v1: nothing could be compared"):
        prove(empty, served_as(two()))


def test_a_failed_check_is_repeated() -> None:
    """A map that failed once must not count as checked at the next load."""
    prover, weights = Prover(), two()
    missing = served_as({EMBED: weights[EMBED]})
    for _ in range(2):
        with pytest.raises(ProofError, match="norm was published, but no rank of the replica serves"):
            prover.prove(manifest(weights, count=1), missing, dict)


# Which values.


@settings(deadline=None, database=None, derandomize=True)
@given(num=st.integers(1, 40), count=st.integers(1, 45), start=st.integers(0, 1000))
def test_rotation_covers_every_tensor(num: int, count: int, start: int) -> None:
    names = tuple(f"t{i}" for i in range(num))
    publications = math.ceil(num / count)
    seen = [sampled_names(names, number, count) for number in range(start, start + publications)]
    assert {name for some in seen for name in some} == set(names)
    assert all(len(some) == min(count, num) for some in seen)


def test_embedding_and_head_are_looked_at_every_time() -> None:
    names = (EMBED, *(f"t{i}" for i in range(20)), HEAD)
    for version in range(30):
        assert {EMBED, HEAD} <= set(sampled_names(names, version, 2))


def test_positions_are_the_same_on_both_sides_and_change_with_the_version() -> None:
    first = sample_positions(3, "a", 10_000)
    assert np.array_equal(first, sample_positions(3, "a", 10_000))
    assert not np.array_equal(first, sample_positions(4, "a", 10_000))
    assert not np.array_equal(first, sample_positions(3, "b", 10_000))
    assert first.shape == (VALUES_PER_TENSOR,)
    assert int(first.min()) >= 0 and int(first.max()) < 10_000
    assert sample_positions(3, "a", 5).shape == (5,)


@pytest.mark.parametrize("tensors", [1, 64, 65, 1_025, 18_867])
def test_all_tensors_are_verified_within_a_rotation(tensors: int) -> None:
    names = [f"w{i}" for i in range(tensors)]
    samples = [sampled_names(names, publication, 16) for publication in range(7, 7 + ROTATION)]
    assert set().union(*samples) == set(names)
    assert max(map(len, samples)) == min(tensors, max(16, -(-tensors // ROTATION)))
