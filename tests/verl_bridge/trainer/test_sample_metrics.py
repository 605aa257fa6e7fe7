# SPDX-License-Identifier: Apache-2.0
"""Every finished response is counted again when its prompt has a fate, or when it is discarded."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from recipe.async_pipeline.core.fates import FATES, Fate, FateRegister
from recipe.async_pipeline.core.items import Group, Trajectory
from tests.conftest import Load

pytestmark = pytest.mark.real_engine

COUNTED_AS = {"trained": "trained", "filtered": "filtered", "expired": "dropped", "failed": "dropped"}


@pytest.fixture
def meters(load: Load) -> Any:
    module = load("recipe.async_pipeline.verl_bridge.trainer.sample_metrics")
    config = OmegaConf.create(
        {
            "actor_rollout_ref": {
                "actor": {"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": None},
                "rollout": {"n": 2, "calculate_log_probs": False},
            }
        }
    )
    return module.SampleMeters(config, 1)


def responses(uid: str, tokens: int = 8) -> tuple[Trajectory, ...]:
    return tuple(
        Trajectory(key=f"{uid}_{i}", first_version=0, last_version=0, num_tokens=tokens) for i in range(2)
    )


def counted(meters: Any) -> dict[str, int]:
    return dict(meters._selection._recent.samples)


def register(meters: Any, uid: str) -> FateRegister:
    fates = FateRegister()
    fates.subscribe(meters.settled)
    fates.draw(uid)
    meters.finished(uid, responses(uid))
    return fates


@pytest.mark.parametrize("fate", FATES)
def test_responses_count_once_with_their_fate(meters: Any, fate: Fate) -> None:
    fates = register(meters, "a")
    if fate == "trained":
        fates.train(1, [Group(uid="a", step=1, trajectories=responses("a", tokens=16))])
    else:
        fates.settle("a", fate)
    meters.discarded("a")
    assert counted(meters) == {"finished": 2, COUNTED_AS[fate]: 2}
    if fate == "trained":
        found, _ = meters.selection()
        assert (found["bias/tokens/finished_mean"], found["bias/tokens/trained_mean"]) == (8, 16), (
            "trained responses may differ: rewards may be added after they finish"
        )


def test_discarded_responses_are_dropped_before_the_prompt_has_a_fate(meters: Any) -> None:
    fates = register(meters, "a")
    meters.discarded("a")
    assert counted(meters) == {"finished": 2, "dropped": 2}
    meters.finished("a", responses("a"))
    fates.settle("a", "filtered")
    assert counted(meters) == {"finished": 4, "dropped": 2, "filtered": 2}


def test_cancelled_responses_are_dropped(meters: Any) -> None:
    meters.cancelled(3.0)
    assert counted(meters) == {"dropped": 2}
