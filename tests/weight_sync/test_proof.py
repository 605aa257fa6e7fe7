# SPDX-License-Identifier: Apache-2.0
"""Verification: correct weights pass in every layout, and every fault of a loader is caught."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.async_pipeline.errors import ProofError
from recipe.async_pipeline.weight_sync.manifest import VALUES_PER_TENSOR, Manifest, TensorEntry
from recipe.async_pipeline.weight_sync.proof import (
    ServedModel,
    draw_sample,
    prove,
    sample_positions,
    sampled_names,
)

VOCABULARY, HIDDEN, KV, MLP = 90, 16, 8, 24
PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
ROWS_SPLIT = (
    "q_proj.weight",
    "k_proj.weight",
    "v_proj.weight",
    "_proj.bias",
    "gate_proj.weight",
    "up_proj.weight",
)
COLUMNS_SPLIT = ("o_proj.weight", "down_proj.weight")
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LAYER = "model.layers.0"
Weights = dict[str, torch.Tensor]


def published(*, tied: bool, dtype: torch.dtype = torch.bfloat16) -> Weights:
    """The tensors of a one-layer decoder, as a trainer names them."""
    shapes: dict[str, tuple[int, ...]] = {EMBED: (VOCABULARY, HIDDEN)}
    for part, rows in (("q", HIDDEN), ("k", KV), ("v", KV)):
        shapes[f"{LAYER}.self_attn.{part}_proj.weight"] = (rows, HIDDEN)
        shapes[f"{LAYER}.self_attn.{part}_proj.bias"] = (rows,)
    shapes[f"{LAYER}.self_attn.o_proj.weight"] = (HIDDEN, HIDDEN)
    shapes[f"{LAYER}.mlp.gate_proj.weight"] = shapes[f"{LAYER}.mlp.up_proj.weight"] = (MLP, HIDDEN)
    shapes[f"{LAYER}.mlp.down_proj.weight"] = (HIDDEN, MLP)
    shapes["model.norm.weight"] = (HIDDEN,)
    if not tied:
        shapes[HEAD] = (VOCABULARY, HIDDEN)
    draw = torch.Generator().manual_seed(1)
    return {name: torch.randn(*shape, generator=draw).to(dtype) for name, shape in shapes.items()}


def served(weights: Weights, rank: int = 0, size: int = 1, *, head: bool = True) -> torch.nn.Module:
    """What an engine makes of them: fused, sharded, with a padded vocabulary, the head tied or not."""
    parameters = {name: shard(name, tensor, rank, size) for name, tensor in weights.items()}
    for fused, parts in PACKED.items():
        for leaf in ("weight", "bias"):
            names = [n for part in parts for n in parameters if n.endswith(f".{part}.{leaf}")]
            if names:
                parent = names[0].rsplit(".", 2)[0]
                parameters[f"{parent}.{fused}.{leaf}"] = torch.cat([parameters.pop(n) for n in names])
    if head and HEAD not in parameters:
        parameters[HEAD] = parameters[EMBED]
    return as_module(parameters)


def shard(name: str, tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """The part of a published tensor that one tensor-parallel rank holds."""
    if name in (EMBED, HEAD):
        tensor = torch.cat([tensor, torch.zeros(-VOCABULARY % 64, HIDDEN, dtype=tensor.dtype)])
    split_rows = name in (EMBED, HEAD) or name.endswith(ROWS_SPLIT)
    if split_rows or name.endswith(COLUMNS_SPLIT):
        return tensor.chunk(size, dim=0 if split_rows else 1)[rank]
    return tensor


def as_module(parameters: Weights) -> torch.nn.Module:
    """A module whose parameters have these names."""
    root = torch.nn.Module()
    for name, tensor in parameters.items():
        *folders, leaf = name.split(".")
        node = root
        for folder in folders:
            if not hasattr(node, folder):
                node.add_module(folder, torch.nn.Module())
            node = node.get_submodule(folder)
        node.register_parameter(leaf, torch.nn.Parameter(tensor.clone(), requires_grad=False))
    return root


def view(model: torch.nn.Module, rank: int = 0, size: int = 1) -> ServedModel:
    return ServedModel(dict(model.named_parameters(remove_duplicate=False)), PACKED, rank, size)


def manifest(weights: Weights, version: int = 1, count: int = 1000) -> Manifest:
    entries = tuple(
        TensorEntry(n, tuple(t.shape), str(t.dtype).removeprefix("torch."), 0, 0, t.nbytes)
        for n, t in weights.items()
    )
    samples = tuple(
        draw_sample(version, n, weights[n]) for n in sampled_names(tuple(weights), version, count)
    )
    return Manifest(version, entries, (), samples)


# What is right passes.


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2), (3, 4)])
def test_every_layout_of_the_same_weights_is_proved(tied: bool, rank: int, size: int) -> None:
    weights = published(tied=tied)
    compared = prove(manifest(weights), view(served(weights, rank, size), rank, size))
    assert compared == len(weights) + tied, "a tied head is compared with the embedding"


def test_an_engine_may_serve_the_embedding_as_head() -> None:
    """Published untied under both names; the engine has no separate head to compare."""
    weights = published(tied=False)
    weights[HEAD] = weights[EMBED]
    model = served({n: t for n, t in weights.items() if n != HEAD}, head=False)
    assert prove(manifest(weights), view(model)) == len(weights) - 1


def test_served_precision_decides() -> None:
    weights = published(tied=True, dtype=torch.float32)
    rounded = {name: tensor.bfloat16() for name, tensor in weights.items()}
    assert prove(manifest(weights), view(served(rounded))) == len(weights) + 1


EXPERTS, INNER = 3, 8


def experts() -> Weights:
    draw = torch.Generator().manual_seed(2)
    shapes = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
    return {
        f"{LAYER}.mlp.experts.{e}.{part}.weight": torch.randn(*shape, generator=draw)
        for e in range(EXPERTS)
        for part, shape in shapes.items()
    }


def served_experts(weights: Weights, rank: int, size: int) -> Weights:
    def stacked(part: str, dim: int) -> torch.Tensor:
        return torch.stack(
            [weights[f"{LAYER}.mlp.experts.{e}.{part}.weight"].chunk(size, dim)[rank] for e in range(EXPERTS)]
        )

    gate_up = torch.cat([stacked("gate_proj", 0), stacked("up_proj", 0)], dim=1)
    base = f"{LAYER}.mlp.experts.routed_experts"
    return {f"{base}.w13_weight": gate_up, f"{base}.w2_weight": stacked("down_proj", 1)}


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2), (3, 4)])
def test_experts_are_proved_where_engines_keep_them(rank: int, size: int) -> None:
    weights = experts()
    model = ServedModel(served_experts(weights, rank, size), PACKED, rank, size)
    assert prove(manifest(weights), model) == 3 * EXPERTS


@pytest.mark.parametrize(
    "pair", [("0.gate_proj", "0.up_proj"), ("0.gate_proj", "1.gate_proj"), ("1.down_proj", "2.down_proj")]
)
def test_experts_that_changed_places(pair: tuple[str, str]) -> None:
    weights, wrong = experts(), experts()
    a, b = (f"{LAYER}.mlp.experts.{name}.weight" for name in pair)
    wrong[a], wrong[b] = weights[b], weights[a]
    with pytest.raises(ProofError, match="is served with values other than the published ones"):
        prove(manifest(weights), ServedModel(served_experts(wrong, 0, 1), PACKED))


def test_an_expert_that_is_not_served() -> None:
    weights = experts()
    kept = served_experts(weights, 0, 1)
    with pytest.raises(ProofError, match="no served parameter holds it"):
        prove(manifest(weights), ServedModel({}, PACKED))
    fewer = {name: tensor[:2] for name, tensor in kept.items()}
    with pytest.raises(
        ProofError, match="experts.2.gate_proj.weight was published but .*w13_weight is served as"
    ):
        prove(manifest(weights), ServedModel(fewer, PACKED))


def test_not_a_number_equals_itself() -> None:
    weights = published(tied=True)
    weights["model.norm.weight"].fill_(math.nan)
    prove(manifest(weights), view(served(weights)))


def test_scalars_and_empty_tensors() -> None:
    weights = {"scale": torch.tensor(3.0), "none": torch.empty(0, 4)}
    assert prove(manifest(weights), ServedModel(weights, {})) == 2


# What is wrong does not.


@pytest.mark.parametrize("name", published(tied=False))
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (1, 2)])
def test_a_tensor_that_the_loader_skipped_is_named(name: str, rank: int, size: int) -> None:
    weights = published(tied=False)
    stale = {**weights, name: torch.randn_like(weights[name])}
    with pytest.raises(ProofError, match=f"v1: {name} is served with values other than"):
        prove(manifest(weights), view(served(stale, rank, size), rank, size))


def zero_lower_half(tensor: torch.Tensor) -> torch.Tensor:
    half = tensor.clone()
    half[len(half) // 2 :] = 0
    return half


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        (f"{LAYER}.mlp.down_proj.weight", zero_lower_half),
        (f"{LAYER}.self_attn.q_proj.bias", zero_lower_half),
        (EMBED, zero_lower_half),
        (f"{LAYER}.self_attn.o_proj.weight", torch.t),
        (f"{LAYER}.mlp.up_proj.weight", lambda tensor: tensor.roll(1, 0)),
        ("model.norm.weight", lambda tensor: tensor + 0.25),
    ],
)
def test_a_tensor_that_is_half_loaded_or_in_the_wrong_place(
    name: str, spoil: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    weights = published(tied=True)
    with pytest.raises(ProofError, match=name):
        prove(manifest(weights), view(served({**weights, name: spoil(weights[name])})))


@pytest.mark.parametrize("pair", [("self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")])
@pytest.mark.parametrize("size", [1, 2])
def test_parts_of_a_fused_tensor_that_changed_places(pair: tuple[str, str], size: int) -> None:
    weights = published(tied=True)
    a, b = (f"{LAYER}.{part}.weight" for part in pair)
    swapped = {**weights, a: weights[b], b: weights[a]}
    with pytest.raises(ProofError, match="the load did not take"):
        prove(manifest(weights), view(served(swapped, 0, size), 0, size))


def test_the_shard_of_another_rank() -> None:
    weights = published(tied=True)
    with pytest.raises(ProofError):
        prove(manifest(weights), view(served(weights, rank=0, size=2), rank=1, size=2))


def test_a_tied_head_on_dummy_values() -> None:
    """The head is a separate parameter; the loader gets no tensor for it and reports nothing."""
    weights = published(tied=True)
    model = served(weights)
    model.get_submodule("lm_head").weight.data.fill_(0.01)  # type: ignore[operator,union-attr]
    with pytest.raises(ProofError, match=f"{HEAD} is served with values other than"):
        prove(manifest(weights), view(model))
    with pytest.raises(ProofError, match=HEAD):
        prove(manifest(weights, count=1), view(model))


@pytest.mark.parametrize(
    "name", [f"{LAYER}.self_attn.qkv_proj.weight", f"{LAYER}.mlp.down_proj.weight", EMBED]
)
def test_a_parameter_that_the_engine_repacked_proves_nothing(name: str) -> None:
    weights = published(tied=True)
    model = served(weights)
    parameter = dict(model.named_parameters())[name]
    parameter.data = torch.empty(0, dtype=parameter.dtype)
    with pytest.raises(ProofError, match=f"{name} has no served tensor to compare; the engine repacked it"):
        prove(manifest(weights), view(model))


def test_a_tensor_that_is_not_served() -> None:
    weights = published(tied=True)
    extra = {**weights, "model.layers.1.mlp.down_proj.weight": torch.zeros(2, 2)}
    with pytest.raises(
        ProofError, match=r"layers\.1\.mlp\.down_proj\.weight was published but no served parameter"
    ):
        prove(manifest(extra), view(served(weights)))


@pytest.mark.parametrize("shape", [(HIDDEN, MLP + 1), (HIDDEN - 1, MLP // 2)])
def test_a_shape_that_no_layout_explains(shape: tuple[int, int]) -> None:
    name = f"{LAYER}.mlp.down_proj.weight"
    weights = published(tied=True)
    model = view(served({**weights, name: torch.zeros(shape, dtype=torch.bfloat16)}), 0, 2)
    with pytest.raises(ProofError, match=f"{name} was published as {HIDDEN}x{MLP} but is served as"):
        model.place(name, {n: tuple(t.shape) for n, t in weights.items()})


def test_a_fused_shape_that_no_layout_explains() -> None:
    weights = published(tied=True)
    shapes = {name: tuple(t.shape) for name, t in weights.items()}
    with pytest.raises(ProofError, match="which 4 ranks of"):
        view(served(weights, 0, 2), 0, 4).place(f"{LAYER}.mlp.gate_proj.weight", shapes)


def test_no_comparison_is_no_proof() -> None:
    weights = published(tied=True)
    made = manifest(weights)
    empty = Manifest(made.version, made.tensors, (), ())
    with pytest.raises(ProofError, match="v1: nothing could be compared"):
        prove(empty, view(served(weights)))


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
