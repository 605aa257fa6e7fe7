# SPDX-License-Identifier: Apache-2.0
"""The sample store has room for what the lag allows, with any batch."""

from __future__ import annotations

from typing import Any

import pytest

from recipe.async_pipeline.config.derived.sample_store import (
    CAPACITY,
    VALIDATION_ROWS,
    fit_capacity,
    store_budget,
)
from recipe.async_pipeline.config.knobs.schema import AsyncPipelineConfig


def config(batch: int = 1024, n: int = 32, **changes: Any) -> dict[str, Any]:
    storage = {"total_storage_size": 100_000, "num_data_storage_units": 8}
    return {
        "data": {
            "train_batch_size": batch,
            "max_prompt_length": 1000,
            "max_response_length": 7000,
            "val_batch_size": changes.get("val_batch_size"),
        },
        "trainer": {"test_freq": 10, "val_before_train": True},
        "actor_rollout_ref": {"rollout": {"n": n, "val_kwargs": {"n": 4}}},
        "transfer_queue": {
            "backend": {
                "storage_backend": changes.get("backend", "SimpleStorage"),
                "SimpleStorage": storage | changes.get("storage", {}),
            }
        },
    }


def knobs(lag: int = 3) -> AsyncPipelineConfig:
    return AsyncPipelineConfig.of({"strategy": "fully_async", "staleness.max_lag": lag})


def test_a_large_batch_gets_room_for_the_batches_of_its_lag() -> None:
    budget = store_budget(config(), knobs())
    assert budget.rows == (3 + 1 + 2) * 1024 * 32
    assert budget.nbytes == budget.rows * 8000 * 100
    ((size, why),) = fit_capacity(config(), knobs()).values()
    assert size == 2 * budget.rows + VALIDATION_ROWS
    assert "up to 196608 rows" in why and "100000 are too few" in why


@pytest.mark.parametrize(("loss", "more"), [("k3", 8), ("forward_kl_topk", 32 * 8)])
def test_what_a_teacher_returns_is_counted(loss: str, more: int) -> None:
    distils = config()
    section = {"loss_mode": loss, "topk": 32}
    distils["distillation"] = {"enabled": True, "distillation_loss": section}
    budget = store_budget(distils, knobs())
    assert budget.nbytes == budget.rows * 8000 * (100 + more)


def test_a_checkpoint_keeps_what_is_freed_before_it_is_written() -> None:
    saves = config()
    saves["trainer"]["save_freq"] = 5
    with_checkpoints, without = store_budget(saves, knobs()), store_budget(config(), knobs())
    assert with_checkpoints.rows == without.rows
    assert with_checkpoints.nbytes is not None and without.nbytes is not None
    assert with_checkpoints.nbytes - without.nbytes == (3 + 1) * 1024 * 32 * 8000 * 100


def test_each_conversation_of_an_agent_is_a_row() -> None:
    agent = {"agentic.agent": "m:f", "agentic.gateway.max_chains": 5}
    several = AsyncPipelineConfig.of({"strategy": "fully_async", "staleness.max_lag": 3, **agent})
    assert store_budget(config(), several).rows == 5 * store_budget(config(), knobs()).rows
    agent = {"agentic.agent": "m:f", "agentic.max_turns": 5}
    follows = AsyncPipelineConfig.of({"strategy": "fully_async", "staleness.max_lag": 3, **agent})
    assert store_budget(config(), follows).rows == 5 * store_budget(config(), knobs()).rows


@pytest.mark.parametrize("lag", range(6))
def test_the_capacity_that_is_set_suffices(lag: int) -> None:
    for batch in (8, 512, 4096):
        found = fit_capacity(config(batch), knobs(lag))
        if found:
            size, _ = found[CAPACITY]
            assert fit_capacity(config(batch, storage={"total_storage_size": size}), knobs(lag)) == {}
        else:
            assert 2 * store_budget(config(batch), knobs(lag)).rows <= 100_000


@pytest.mark.parametrize("changes", [{"storage": {"total_storage_size": None}}, {"backend": "MooncakeStore"}])
def test_a_store_without_a_limit_of_rows_is_left_alone(changes: dict[str, Any]) -> None:
    assert store_budget(config(**changes), knobs()).capacity is None
    assert fit_capacity(config(**changes), knobs()) == {}


def test_validation_counts_where_its_batch_is_known() -> None:
    assert store_budget(config(val_batch_size=500), knobs()).validation_rows == 500 * 5
    many = config(8, 8, val_batch_size=50_000)
    assert fit_capacity(many, knobs())[CAPACITY][0] == 2 * store_budget(many, knobs()).rows + 250_000
    never = config(val_batch_size=50_000) | {"trainer": {"test_freq": -1, "val_before_train": False}}
    assert store_budget(never, knobs()).validation_rows == 0


def test_a_whole_validation_counts_with_the_prompts_of_its_files() -> None:
    small = config(8, 8)
    rows = 2 * store_budget(small, knobs()).rows
    assert fit_capacity(small, knobs(), lambda: (100_000 - rows) // 5) == {}
    ((size, why),) = fit_capacity(small, knobs(), lambda: 30_000).values()
    assert size == rows + 150_000
    assert "and 150000 in validation, and 100000 are too few" in why
    assert fit_capacity(config(8, 8, val_batch_size=10), knobs(), lambda: 30_000) == {}
    assert fit_capacity(small, knobs(), lambda: None) == {}, "files that are elsewhere"


def test_a_length_that_is_not_configured_leaves_the_memory_open() -> None:
    unknown = config()
    del unknown["data"]["max_response_length"]
    assert store_budget(unknown, knobs()).nbytes is None
