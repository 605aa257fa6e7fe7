# SPDX-License-Identifier: Apache-2.0
"""Who has adapters follows from verl's keys."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from recipe.async_pipeline.config.paths import OWN
from tests.conftest import Load
from tests.verl_bridge.conftest import Smoke

pytestmark = pytest.mark.real_engine

MODEL = "actor_rollout_ref.model"
REFRESH = f"{OWN}.training.ref_refresh_every"


@pytest.fixture(scope="module")
def adapters(load: Load) -> ModuleType:
    return load("recipe.async_pipeline.config.derived.adapters")


@pytest.fixture(scope="module")
def groups(load: Load) -> ModuleType:
    return load("recipe.async_pipeline.verl_bridge.workers.log_prob_group")


@pytest.fixture(scope="module")
def logp(load: Load) -> ModuleType:
    return load("recipe.async_pipeline.verl_bridge.workers.log_prob_worker")


@pytest.mark.parametrize(
    ("changes", "rank", "alone"),
    [
        ({}, 0, False),
        ({f"{MODEL}.lora_rank": 8}, 8, True),
        ({f"{MODEL}.lora_rank": 8, f"{MODEL}.lora.merge": True}, 8, False),
        ({f"{MODEL}.lora": None}, 0, False),
    ],
)
def test_merged_adapters_are_published_as_whole_weights(
    adapters: ModuleType, smoke: Smoke, changes: dict[str, Any], rank: int, alone: bool
) -> None:
    config = smoke(changes)
    assert (adapters.adapter_rank(config), adapters.publishes_adapters(config)) == (rank, alone)


@pytest.mark.parametrize(
    ("merge", "refresh", "old", "reference"), [(False, 0, 8, 0), (False, 4, 8, 8), (True, 4, 0, 0)]
)
def test_a_copy_has_adapters_if_it_gets_published_ones(
    groups: ModuleType, logp: ModuleType, smoke: Smoke, merge: bool, refresh: int, old: int, reference: int
) -> None:
    path = {f"{MODEL}.lora_adapter_path": "there"}
    config = smoke({f"{MODEL}.lora_rank": 8, f"{MODEL}.lora.merge": merge, REFRESH: refresh, **path})
    before = config.copy()
    for made, rank in (
        (logp.logp_config(config.actor_rollout_ref), old),
        (groups.reference_config(config), reference),
    ):
        assert made.model.lora_rank == rank
        assert made.model.lora_adapter_path == ("there" if rank else None)
        assert made.rollout == config.actor_rollout_ref.rollout
    assert config == before
