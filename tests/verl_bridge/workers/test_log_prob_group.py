# SPDX-License-Identifier: Apache-2.0
"""Work on separate devices is retried on new workers when its workers die."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from recipe.async_pipeline.config.paths import OWN
from recipe.async_pipeline.core.waits.clock import run_virtual
from tests.conftest import Load
from tests.verl_bridge.conftest import Smoke

pytestmark = pytest.mark.real_engine


class Workers:
    """Workers that die during the first `deaths` attempts."""

    def __init__(self, deaths: int, error: Exception | None = None) -> None:
        self.deaths, self.error, self.started = deaths, error or ActorDiedError(), 0

    async def work(self) -> str:
        if self.started < self.deaths:
            raise self.error
        return "done"

    async def restart(self, error: Exception) -> None:
        assert error is self.error
        self.started += 1


def test_work_is_retried_on_restarted_workers(module: ModuleType) -> None:
    workers = Workers(deaths=module.ATTEMPTS - 1)
    assert run_virtual(module.retry_on_actor_death(workers.work, workers.restart)) == "done"
    assert workers.started == module.ATTEMPTS - 1


def test_attempts_are_limited(module: ModuleType) -> None:
    workers = Workers(deaths=module.ATTEMPTS)
    with pytest.raises(ActorDiedError):
        run_virtual(module.retry_on_actor_death(workers.work, workers.restart))
    assert workers.started == module.ATTEMPTS - 1


def test_other_errors_propagate(module: ModuleType) -> None:
    workers = Workers(deaths=1, error=ValueError("a batch of nothing"))
    with pytest.raises(ValueError, match="a batch of nothing"):
        run_virtual(module.retry_on_actor_death(workers.work, workers.restart))
    assert workers.started == 0


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
    return load("recipe.async_pipeline.verl_bridge.workers.log_prob_group")


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
