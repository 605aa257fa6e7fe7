# SPDX-License-Identifier: Apache-2.0
"""A published version arrives in blocks, however they are cut, and what did not arrive is found."""

from __future__ import annotations

import json
from collections.abc import Iterator

import msgspec
import pytest
import torch

from recipe.async_pipeline.errors import ProofError, WeightSyncError
from recipe.async_pipeline.weight_sync.engine.shard_load import load_parts, prove_parts, require_same_adapter
from recipe.async_pipeline.weight_sync.memory.arena import ArenaReader, ArenaWriter, HeldBlock
from recipe.async_pipeline.weight_sync.memory.board import await_manifest
from recipe.async_pipeline.weight_sync.memory.manifest import Manifest
from tests import HANG_S

Published = tuple[Manifest, dict[str, torch.Tensor]]


def weights(seed: int) -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(seed)
    shapes = {"embed": (40, 6), "norm": (6,), "experts": (4, 5, 3), "scale": (1,)}
    return {name: torch.randn(shape, generator=chance) for name, shape in shapes.items()} | {
        "empty": torch.zeros(0, 3),
        "steps": torch.tensor(3.0 + seed),
    }


@pytest.fixture
def published() -> Iterator[Published]:
    """In bfloat16, as rollout engines want it; every tensor is sampled."""
    writer = ArenaWriter(512, 100, torch.bfloat16)
    manifest = await_manifest(writer.gather(7, weights(1).items()), HANG_S)
    yield manifest, ArenaReader().tensors(manifest)
    writer.close()


def cut(tensors: dict[str, torch.Tensor], rank: int, ranks: int, dim: int) -> list[HeldBlock]:
    """What one of several ranks holds, if each tensor is cut along one dimension; the last may hold
    nothing.
    """
    parts = []
    for name, whole in tensors.items():
        if whole.dim() == 0:
            parts.append(HeldBlock(name, (), whole.dtype, (), whole.clone()))
            continue
        along = min(dim, whole.dim() - 1)
        blocks = whole.clone().tensor_split(ranks, along)
        first = sum(block.shape[along] for block in blocks[:rank])
        offset = tuple(first if d == along else 0 for d in range(whole.dim()))
        parts.append(HeldBlock(name, tuple(whole.shape), whole.dtype, offset, blocks[rank]))
    return parts


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_every_rank_gets_its_blocks(published: Published, ranks: int, dim: int) -> None:
    manifest, tensors = published
    compared = 0
    for rank in range(ranks):
        parts = cut(weights(2), rank, ranks, dim)
        load_parts(7, tensors, parts)
        compared += prove_parts(manifest, parts)
        for part in parts:
            assert part.values is not None
            block = tuple(slice(o, o + n) for o, n in zip(part.offset, part.values.shape, strict=True))
            assert torch.equal(part.values, weights(1)[part.name].bfloat16().float()[block])
    assert compared >= 4, "each tensor that has elements"


def test_a_block_between_other_elements_is_loaded_and_proved(published: Published) -> None:
    """Its values have one dimension more than the block, as in a fused Megatron weight."""
    manifest, tensors = published
    parts = [
        part._replace(values=torch.zeros(len(part.values), 2, *part.shape[1:])[:, :1], block=part.shape)
        for part in cut(weights(2), 0, 1, 0)
        if part.values is not None and part.shape
    ]
    published_here = {part.name: tensors[part.name] for part in parts}
    load_parts(7, published_here, parts)
    assert prove_parts(manifest, parts) >= 3
    for part in parts:
        assert part.values is not None
        assert torch.equal(part.values[:, 0], tensors[part.name].float())


def test_one_wrong_block_is_found(published: Published) -> None:
    manifest, tensors = published
    for number, name in enumerate(weights(1)):
        if name == "empty":
            continue
        parts = cut(weights(2), 0, 1, 0)
        load_parts(7, tensors, parts)
        values = parts[number].values
        assert values is not None
        values.add_(1)
        with pytest.raises(ProofError, match=f"v7: {name} differs from the published values"):
            prove_parts(manifest, parts)


def test_what_was_never_loaded_is_found(published: Published) -> None:
    with pytest.raises(ProofError):
        prove_parts(published[0], cut(weights(2), 0, 2, 0))


def test_a_rank_that_holds_nothing_has_nothing_to_do(published: Published) -> None:
    manifest, tensors = published
    parts = [part._replace(values=None) for part in cut(weights(2), 0, 1, 0)]
    load_parts(7, tensors, parts)
    assert prove_parts(manifest, parts) == 0


def test_another_model_is_refused_before_anything_is_written(published: Published) -> None:
    _, tensors = published
    more = cut({**weights(2), "extra": torch.zeros(2)}, 0, 1, 0)
    before = [part.values.clone() for part in more if part.values is not None]
    with pytest.raises(WeightSyncError, match="v7 and this model differ in 1 tensors, e.g. extra"):
        load_parts(7, tensors, more)
    with pytest.raises(WeightSyncError, match=r"v7: norm has the shape \(6,\), here \(5,\)"):
        load_parts(7, tensors, cut({**weights(2), "norm": torch.zeros(5)}, 0, 1, 0))
    assert all(
        torch.equal(part.values, b) for part, b in zip(more, before, strict=True) if part.values is not None
    )


def test_an_adapter_goes_into_an_equal_adapter_only(published: Published) -> None:
    weights_of, adapter = published[0], json.dumps({"r": 4, "lora_alpha": 8, "inference_mode": False})
    require_same_adapter(weights_of, None)
    with pytest.raises(WeightSyncError, match="v7 is of whole weights, but this model takes a LoRA adapter"):
        require_same_adapter(weights_of, adapter)

    adapter_of = msgspec.structs.replace(weights_of, adapter=adapter)
    require_same_adapter(adapter_of, json.dumps({"r": 4, "lora_alpha": 8, "inference_mode": True}))
    with pytest.raises(WeightSyncError, match="v7 is of a LoRA adapter, but this model takes whole weights"):
        require_same_adapter(adapter_of, None)
    with pytest.raises(WeightSyncError, match="an adapter with lora_alpha=8, this model has one with 16"):
        require_same_adapter(adapter_of, json.dumps({"r": 4, "lora_alpha": 16}))
