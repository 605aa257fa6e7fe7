# SPDX-License-Identifier: Apache-2.0
"""When two trained models are one.

Adam divides each gradient by its own size, so where a gradient is next to nothing its rounding noise moves
the weight like
any other. Few weights are so, and none gets far: a step moves a weight by 6e-4 at most here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file

CLOSE, CLOSE_SHARE = 1e-5, 0.999
FARTHEST = 5e-5
"""A twelfth of one step."""
WITHOUT_GRADIENT = "k_proj.bias"
"""It adds the same to all scores of a query, so the softmax is blind to it: its gradient is noise."""


def saved_weights(checkpoints: Path, step: int) -> dict[str, torch.Tensor]:
    """Return the actor's weights in a checkpoint of FSDP on one rank, or of Megatron on any number."""
    actor = checkpoints / f"global_step_{step}" / "actor"
    if (actor / "model" / "huggingface").is_dir():
        files = sorted((actor / "model" / "huggingface").glob("*.safetensors"))
        assert files, f"{actor} has no weights"
        return {name: tensor for file in files for name, tensor in load_file(file).items()}
    loaded = torch.load(actor / "model_world_size_1_rank_0.pt", weights_only=False)
    return {
        name: tensor.to_local() if hasattr(tensor, "to_local") else tensor for name, tensor in loaded.items()
    }


def saved_shards(checkpoints: Path, step: int, ranks: int) -> dict[str, torch.Tensor]:
    """Return the actor's weights in a checkpoint of FSDP2 on several ranks, which split dimension 0."""
    folder = checkpoints / f"global_step_{step}" / "actor"
    shards = [
        torch.load(folder / f"model_world_size_{ranks}_rank_{rank}.pt", weights_only=False)
        for rank in range(ranks)
    ]
    return {
        name: torch.cat([shard[name].to_local() for shard in shards])
        if hasattr(tensor, "to_local")
        else tensor
        for name, tensor in shards[0].items()
    }


def assert_equal_bits(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> None:
    """No value of one run differs from the other's."""
    assert ours.keys() == theirs.keys()
    differ = [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])]
    assert not differ, f"{len(differ)} of {len(ours)} tensors differ, the first is {differ[0]}"


def assert_same_weights(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> None:
    """Nearly all values are as good as equal, and none is far off."""
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        if name.endswith(WITHOUT_GRADIENT):
            continue
        apart = (tensor.double() - theirs[name].double()).abs()
        assert float(apart.max()) <= FARTHEST, (name, float(apart.max()))
        assert float((apart <= CLOSE).double().mean()) >= CLOSE_SHARE, name
