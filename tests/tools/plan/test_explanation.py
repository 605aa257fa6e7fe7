# SPDX-License-Identifier: Apache-2.0
"""A plan in words: the figures belong to the layout, and each sentence says what to change."""

from __future__ import annotations

import re

import msgspec
import pytest

from recipe.async_pipeline.tools.plan.candidates import candidates_of
from recipe.async_pipeline.tools.plan.distribution import Lognormal
from recipe.async_pipeline.tools.plan.explanation import explained, idle_reason, load_of
from recipe.async_pipeline.tools.plan.profile import Answers, Batch, Decode
from recipe.async_pipeline.tools.plan.search import SearchResult, plan
from tests.tools.plan.workloads import LONG_TAIL, TRAINING, profile, setting


@pytest.fixture(scope="module")
def short_lag() -> SearchResult:
    return plan(LONG_TAIL, 16, max_lag=1)


def test_the_load_of_a_layout_by_hand() -> None:
    """Two replicas write 8 responses of 10 tokens per second: 40 tokens/s each, at 10 a response."""
    of = profile(answers=Answers(tokens=10.0, prompt_tokens=4.0))
    load = load_of(setting(of, "n_step_ahead", max_lag=3, depth=1), 1.0)
    assert load.at_once == 4
    assert load.at_most == 2 * 8 / 2
    assert load.held_tokens == 4 + 10 / 2
    assert load.waiting == 3 * 8
    assert load.waiting_tokens == 3 * 8 * 14


def test_slots_limit_the_responses_of_a_replica() -> None:
    of = profile(decode=Decode(token_s=(0.1,), slots=3), batch=Batch(groups=40, answers=2))
    load = load_of(setting(of, "n_step_ahead", max_lag=3), 1.0)
    assert (load.at_once, load.at_most) == (3, 3)


def test_long_responses_hold_cache_for_longer() -> None:
    of = profile(answers=Answers(tokens=Lognormal(median=100, sigma=1.0, cap=5000)))
    mean = 100 * 2.718281828**0.5
    assert load_of(setting(of), 10.0).held_tokens > 1.5 * mean / 2


@pytest.mark.slow
def test_a_lag_that_waits_for_the_tail_names_the_lag_that_would_not(short_lag: SearchResult) -> None:
    text = "\n".join(explained(short_lag))
    found = re.search(r"max_lag 1 spreads over 2 steps; with --max-lag (\d+) the limit would be", text)
    assert found is not None, text
    terms = short_lag.found[0].candidate.terms
    others = max(seconds for name, seconds in terms.items() if name != "loop")
    assert terms["loop"] * 2 / (int(found[1]) + 1) <= others < terms["loop"] * 2 / int(found[1])


@pytest.mark.slow
def test_every_pool_and_the_memory_are_explained(short_lag: SearchResult) -> None:
    lines = explained(short_lag)
    for pool in short_lag.found[0].candidate.setting.placement.pools:
        assert any(
            line.startswith(f"pools: {pool.name} (") and f"{pool.devices} devices, " in line for line in lines
        )
    assert sum(line.startswith("memory: ") for line in lines) == 2
    assert "pools: none sets the pace; the limit is the slowest response of each batch" in "\n".join(lines)


@pytest.mark.slow
def test_a_synchronous_plan_says_who_has_the_memory() -> None:
    lines = explained(plan(TRAINING, 16, max_lag=1))
    assert lines[0].startswith("lag: none")
    assert "release its memory" in lines[1]
    assert "all 16 devices" in lines[2]


@pytest.mark.parametrize(
    ("replica", "devices", "groups", "pools", "why"),
    [
        (
            16,
            25,
            64,
            (8, 16),
            "train takes whole nodes of 8; generate grows by 16, whole replicas of 16 on whole",
        ),
        (
            4,
            11,
            8,
            (4, 4),
            "no train of 5 to 7 devices divides a batch of 64 samples; generate grows by whole",
        ),
        (8, 14, 2, (4, 8), "no train of 5 to 6 devices divides a batch of 16 samples; generate grows by 8"),
        (
            3,
            25,
            4,
            (16, 6),
            "train takes whole nodes of 8; generate stays within a node of 8, which replicas of 3",
        ),
    ],
)
def test_idle_devices_have_the_reason(
    replica: int, devices: int, groups: int, pools: tuple[int, int], why: str
) -> None:
    of = msgspec.structs.replace(
        LONG_TAIL, devices_per_replica=replica, batch=Batch(groups=groups, answers=8)
    )
    candidate = next(
        found
        for found in candidates_of(of, devices, 0, 1)
        if tuple(pool.devices for pool in found.setting.placement.pools) == pools
    )
    assert f"idle, because {why}" in " ".join(idle_reason(candidate))
