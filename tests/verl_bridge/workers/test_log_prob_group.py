# SPDX-License-Identifier: Apache-2.0
"""Work on devices of its own outlives the workers that do it."""

from __future__ import annotations

from types import ModuleType

import pytest
from ray.exceptions import ActorDiedError

from recipe.async_pipeline.core.clock import run_virtual
from tests.conftest import Load

pytestmark = pytest.mark.real_engine


@pytest.fixture(scope="module")
def ours(load: Load) -> ModuleType:
    return load("recipe.async_pipeline.verl_bridge.workers.log_prob_group")


class Workers:
    """They die of the first pieces of work."""

    def __init__(self, deaths: int, error: Exception | None = None) -> None:
        self.deaths, self.error, self.started = deaths, error or ActorDiedError(), 0

    async def work(self) -> str:
        if self.started < self.deaths:
            raise self.error
        return "done"

    async def restart(self, error: Exception) -> None:
        assert error is self.error
        self.started += 1


def test_work_is_begun_again_on_workers_that_were_started_anew(ours: ModuleType) -> None:
    workers = Workers(deaths=ours.ATTEMPTS - 1)
    assert run_virtual(ours.retry_on_actor_death(workers.work, workers.restart)) == "done"
    assert workers.started == ours.ATTEMPTS - 1


def test_workers_that_die_again_and_again_end_it(ours: ModuleType) -> None:
    workers = Workers(deaths=ours.ATTEMPTS)
    with pytest.raises(ActorDiedError):
        run_virtual(ours.retry_on_actor_death(workers.work, workers.restart))
    assert workers.started == ours.ATTEMPTS - 1


def test_what_is_no_death_comes_through(ours: ModuleType) -> None:
    workers = Workers(deaths=1, error=ValueError("a batch of nothing"))
    with pytest.raises(ValueError, match="a batch of nothing"):
        run_virtual(ours.retry_on_actor_death(workers.work, workers.restart))
    assert workers.started == 0
