# SPDX-License-Identifier: Apache-2.0
"""A response's seed follows from its prompt, its batch and its number; it reaches the sampling parameters."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.conftest import Load

MODULE = "recipe.async_pipeline.lab.gpu_kit.seeded_loop"


def row(**changes: int) -> dict[str, int]:
    return {"global_steps": 3, "index": 5, "session_id": 1, **changes}


@pytest.mark.real_engine
def test_each_response_has_another_seed(load: Load) -> None:
    seed_of = load(MODULE).seed_of
    rows = [row()] + [row(**{name: 4}) for name in row()]
    assert len({seed_of(one) for one in rows}) == len(rows)
    assert seed_of({**row(), "uid": "another run's"}) == seed_of(row())


@pytest.mark.real_engine
def test_the_seed_joins_the_sampling_parameters(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load(MODULE)
    got: list[dict[str, Any]] = []

    async def run(self: Any, sampling_params: dict[str, Any], **kwargs: Any) -> None:
        got.append(sampling_params)

    monkeypatch.setattr(module.SingleTurnAgentLoop, "run", run)
    rollout = OmegaConf.create({"actor_rollout_ref": {"rollout": {"prompt_length": 8, "response_length": 8}}})

    async def respond() -> None:
        loop = module.SeededLoop(SimpleNamespace(config=rollout), *[None] * 4, SimpleNamespace(config={}))
        await loop.run({"temperature": 0.5}, **row())

    asyncio.run(respond())
    assert got == [{"temperature": 0.5, "seed": module.seed_of(row())}]
