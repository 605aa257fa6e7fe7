# SPDX-License-Identifier: Apache-2.0
"""What a load is responsible for, and what the engine must compute again after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from recipe.async_pipeline.errors import ProofError


class Latent(torch.nn.Module):
    """As much of a layer of latent attention as engines of all versions have."""

    def __init__(self, names: tuple[str, str], copied: bool) -> None:
        super().__init__()
        self.kv_b_proj = torch.nn.Linear(8, 2 * (4 + 3), bias=False)  # two heads, keys of 4, values of 3
        keys, values = self.kv_b_proj.weight.detach().view(2, 7, 8).split([4, 3], dim=1)
        for name, half in zip(names, (keys, values.transpose(1, 2)), strict=True):
            half = half.clone() if copied else half
            setattr(self, name, torch.nn.Parameter(half) if names[0] == "W_UK_T" else half)


NAMES = [("W_UK_T", "W_UV"), ("w_kc", "w_vc")]


@pytest.mark.parametrize("names", NAMES)
def test_products_of_latent_attention_must_follow_from_the_loaded_weight(
    module: Any, names: tuple[str, str]
) -> None:
    viewed, copied = (torch.nn.ModuleDict({"attn": Latent(names, one)}) for one in (False, True))
    for model in (viewed, copied):
        assert list(dict(module.served_tensors(model))) == ["attn.kv_b_proj.weight"]
        module.require_fresh_products(model)
        model["attn"].kv_b_proj.weight.data.add_(1)
    module.require_fresh_products(viewed)
    with pytest.raises(ProofError, match=rf"attn\.{names[0]} does not follow from attn\.kv_b_proj\.weight"):
        module.require_fresh_products(copied)


def test_routing_tables_belong_to_the_engine(module: Any) -> None:
    """Some versions register them as persistent."""
    model = torch.nn.Module()
    for name in ("_expert_map", "expert_mask", "expert_local_to_global", "e_score_correction_bias"):
        model.register_buffer(name, torch.zeros(4))
    assert list(dict(module.served_tensors(model))) == ["e_score_correction_bias"]
