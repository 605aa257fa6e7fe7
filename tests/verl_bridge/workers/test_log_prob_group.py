# SPDX-License-Identifier: Apache-2.0
"""Work on separate devices is retried on new workers when its workers die."""

from __future__ import annotations

from types import ModuleType

import pytest
from ray.exceptions import ActorDiedError

from recipe.async_pipeline.core.waits.clock import run_virtual

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
