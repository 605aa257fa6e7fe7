# SPDX-License-Identifier: Apache-2.0
"""The first sound episodes make the group; the others have ended by then."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from recipe.async_pipeline.agents.episodes import REDUNDANT
from recipe.async_pipeline.core.groups.items import Trajectory, spans_of
from recipe.async_pipeline.core.waits.clock import run_virtual
from recipe.async_pipeline.observe.samples.selection_bias import SelectionMeter
from recipe.async_pipeline.verl_bridge.agent_loop.episodes import redundancy
from recipe.async_pipeline.verl_bridge.agent_loop.episodes.redundancy import Begun, Redundant, first_sound
from recipe.async_pipeline.verl_bridge.agent_loop.tokens.version_spans import ResponseTurn

pytestmark = pytest.mark.virtual_time


def settled(
    seconds: Sequence[float], needed: int, *, unsound: Sequence[int] = (), raising: Sequence[int] = ()
) -> tuple[list[int] | None, list[int], float]:
    """Return what `first_sound` finds in sessions that take so long, which were cancelled, and the time."""
    cancelled: list[int] = []

    async def session(i: int) -> None:
        try:
            await asyncio.sleep(seconds[i])
        except asyncio.CancelledError as error:
            assert error.args == (REDUNDANT,)
            cancelled.append(i)
            raise
        if i in raising:
            raise ValueError(i)

    async def story() -> tuple[list[int] | None, list[int], float]:
        sessions = [asyncio.create_task(session(i)) for i in range(len(seconds))]
        found = await first_sound(sessions, needed, lambda i: i not in unsound)
        assert all(one.done() for one in sessions)
        for i in raising:
            assert i in cancelled or sessions[i].exception()
        return found, sorted(cancelled), asyncio.get_running_loop().time()

    began = 0.0
    found, ended, at = run_virtual(story())
    return found, ended, round(at - began, 3)


@pytest.mark.parametrize(
    ("seconds", "kwargs", "found", "cancelled", "took"),
    [
        ((3, 1, 2, 9), {}, [1, 2], [0, 3], 2),
        ((3, 1, 9), {"unsound": [1]}, [0, 2], [], 9),
        ((3, 1, 9), {"unsound": [1, 2]}, None, [], 9),
        ((1, 2, 3), {"raising": [0]}, None, [], 3),
        ((1, 2, 3), {"raising": [2]}, [0, 1], [2], 2),
    ],
    ids=["two of four", "an unsound one is replaced", "too few", "an error", "an error too late"],
)
def test_the_first_sound_sessions_are_chosen(
    seconds: Sequence[float], kwargs: Any, found: list[int] | None, cancelled: list[int], took: float
) -> None:
    assert settled(seconds, 2, **kwargs) == (found, cancelled, took)


def test_sessions_that_end_in_the_same_moment_are_taken_in_order() -> None:
    found, cancelled, _ = settled([1] * 5, 3)
    assert (found, cancelled) == ([0, 1, 2], [])


async def test_a_cancellation_reaches_all_sessions() -> None:
    sessions = [asyncio.create_task(asyncio.sleep(100)) for _ in range(3)]
    waiting = asyncio.create_task(first_sound(sessions, 2, lambda i: True))
    await asyncio.sleep(1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert all(one.cancelled() for one in sessions)


async def test_a_session_that_ignores_its_cancellation_is_left_behind() -> None:
    async def stubborn() -> None:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            await asyncio.sleep(1000)

    loop = asyncio.get_running_loop()
    began = loop.time()
    sessions = [asyncio.create_task(asyncio.sleep(1)), asyncio.create_task(stubborn())]
    assert await first_sound(sessions, 1, lambda i: True) == [0]
    took = loop.time() - began
    await asyncio.wait(sessions)
    assert took == pytest.approx(1 + redundancy.END_S)


def test_what_is_known_of_an_episode_that_was_not_needed() -> None:
    turns = [ResponseTurn(10, spans_of([[1, 0]]), tokens=2), ResponseTurn(18, spans_of([[1, 0]]), tokens=3)]
    assert Redundant.cancelled(turns, 4.0) == (11, 3, 4.0, None)
    assert Redundant.cancelled([], 4.0) == (None, 1, 4.0, None)
    parts = [
        Trajectory(key=f"a_0_{i}", first_version=0, last_version=0, num_tokens=5, turns=4, reward=i / 2)
        for i in range(2)
    ]
    assert Redundant.finished(parts, 2.0) == (10, 8, 2.0, 0.5)
    unknown = [replace(one, turns=None) for one in parts]
    assert Redundant.finished([unknown[0], parts[1]], 2.0).turns == 4
    assert Redundant.finished(unknown, 2.0).turns is None
    assert Begun().seconds >= 0


def test_the_bias_towards_short_episodes_is_measured() -> None:
    """Of 8 + 2 episodes the two longest are ended: the trained ones are shorter, and a warning says so."""
    rng, meter = random.Random(1), SelectionMeter()
    for _ in range(60):
        lengths = sorted(rng.randint(10, 200) for _ in range(10))
        for tokens in lengths[:8]:
            meter.record("finished", tokens=tokens, turns=2, seconds=tokens / 10, reward=0.0)
            meter.record("trained", tokens=tokens, turns=2, seconds=tokens / 10, reward=0.0)
        for _ in lengths[8:]:
            so_far = ResponseTurn(10, spans_of([[1, 0]]), tokens=lengths[7])
            meter.record("redundant", **Redundant.cancelled([so_far], lengths[7] / 10)._asdict())

    metrics = meter.metrics()
    assert metrics["bias/redundant_share"] == pytest.approx(0.2)
    assert metrics["bias/tokens/redundant_shift_sd"] < -0.2
    warning = meter.warning()
    assert warning is not None and "were redundant" in warning and "agentic.redundancy" in warning
