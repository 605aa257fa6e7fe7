# SPDX-License-Identifier: Apache-2.0
"""How many ranks read different rows."""

from __future__ import annotations

from typing import Any

import pytest

from recipe.async_pipeline.config.checks.batch_sizes import training_ranks


@pytest.mark.parametrize(
    ("actor", "devices", "ranks"),
    [
        ({"strategy": "fsdp2"}, 1, 1),
        ({"strategy": "fsdp2", "fsdp_config": {"fsdp_size": -1}}, 4, 4),
        ({"strategy": "fsdp", "fsdp_config": {"fsdp_size": 2}, "ulysses_sequence_parallel_size": 2}, 8, 4),
        ({"strategy": "fsdp", "fsdp_config": {"ulysses_sequence_parallel_size": 4}}, 8, 2),
        (
            {
                "strategy": "fsdp",
                "fsdp_config": {"ulysses_sequence_parallel_size": 4},
                "ulysses_sequence_parallel_size": 2,
            },
            8,
            4,
        ),
        ({"strategy": "megatron", "megatron": {}}, 2, 2),
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
        ),
    ],
)
def test_ranks_that_share_a_sequence_or_a_model_read_the_same_rows(
    actor: dict[str, Any], devices: int, ranks: int
) -> None:
    assert training_ranks({"actor_rollout_ref": {"actor": actor}}, devices).number == ranks
