# SPDX-License-Identifier: Apache-2.0
"""How much a version is: whole weights or adapters, in the engine's dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from recipe.async_pipeline.config.derived.adapters import arena_bytes, published_parameters, version_bytes


@pytest.mark.parametrize(
    ("dtype", "model", "parameters", "item"),
    [
        ("bfloat16", {}, 600, 2),
        ("float32", {}, 600, 4),
        ("auto", {"lora_rank": 5}, 5 * (20 + 30), 2),
        ("auto", {"lora_rank": 5, "lora": {"merge": True}}, 600, 2),
    ],
)
def test_two_copies_of_what_is_published(
    tmp_path: Path, dtype: str, model: dict[str, Any], parameters: int, item: int
) -> None:
    save_file({"up_proj.weight": torch.zeros(20, 30)}, tmp_path / "model.safetensors")
    config = {"actor_rollout_ref": {"model": {"path": str(tmp_path), **model}, "rollout": {"dtype": dtype}}}
    assert (published_parameters(config), version_bytes(config)) == (parameters, item * parameters)
    assert arena_bytes(config) == 2 * item * parameters


def test_a_model_that_is_elsewhere_has_no_known_size() -> None:
    config = {"actor_rollout_ref": {"model": {"path": "some/model"}, "rollout": {"dtype": "auto"}}}
    assert arena_bytes(config) is None
