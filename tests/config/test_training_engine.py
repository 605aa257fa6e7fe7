# SPDX-License-Identifier: Apache-2.0
"""The training engine in words."""

from __future__ import annotations

from typing import Any

import pytest

from recipe.async_pipeline.config.training_engine import data_parallel, describe_training


@pytest.mark.parametrize(
    ("actor", "devices", "ranks", "text"),
    [
        ({"strategy": "fsdp2"}, 1, 1, "FSDP2, weights sharded over one device"),
        (
            {"strategy": "fsdp2", "fsdp_config": {"fsdp_size": -1}},
            4,
            4,
            "FSDP2, weights sharded over 4 devices",
        ),
        (
            {"strategy": "fsdp", "fsdp_config": {"fsdp_size": 2}, "ulysses_sequence_parallel_size": 2},
            8,
            4,
            "FSDP, weights sharded over 2 devices, 4 copies, sequences over 2 (Ulysses)",
        ),
        (
            {"strategy": "fsdp", "fsdp_config": {"ulysses_sequence_parallel_size": 4}},
            8,
            2,
            "FSDP, weights sharded over 8 devices, sequences over 4 (Ulysses)",
        ),
        (
            {
                "strategy": "fsdp",
                "fsdp_config": {"ulysses_sequence_parallel_size": 4},
                "ulysses_sequence_parallel_size": 2,
            },
            8,
            4,
            "FSDP, weights sharded over 8 devices, sequences over 2 (Ulysses)",
        ),
        ({"strategy": "megatron", "megatron": {}}, 2, 2, "Megatron, data-parallel 2"),
        (
            {
                "strategy": "megatron",
                "megatron": {
                    "tensor_model_parallel_size": 2,
                    "pipeline_model_parallel_size": 2,
                    "context_parallel_size": 1,
                    "expert_model_parallel_size": 4,
                    "expert_tensor_parallel_size": None,
                },
            },
            16,
            4,
            "Megatron, tensor-parallel 2, pipeline-parallel 2, expert-parallel 4, data-parallel 4",
        ),
    ],
)
def test_the_engine_and_its_ranks_are_named(
    actor: dict[str, Any], devices: int, ranks: int, text: str
) -> None:
    assert describe_training({"actor_rollout_ref": {"actor": actor}}, devices) == text
    assert data_parallel({"actor_rollout_ref": {"actor": actor}}, devices) == ranks
