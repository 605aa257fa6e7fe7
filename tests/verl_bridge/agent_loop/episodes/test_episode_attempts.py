# SPDX-License-Identifier: Apache-2.0
"""An episode that fails is repeated alone; what is no fault of the episode ends the run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

import pytest

from recipe.async_pipeline.agents.episodes import EndPolicies, EpisodeRules
from recipe.async_pipeline.agents.processes.commands import OutputLog
from recipe.async_pipeline.core.groups.bad_data import Flaw
from recipe.async_pipeline.core.waits.clock import run_virtual
from recipe.async_pipeline.errors import EnvironmentFailed, WaitTimeout
from recipe.async_pipeline.observe.run_directory.agent_output import FailedAttempt
from recipe.async_pipeline.verl_bridge.agent_loop.episodes import episode_attempts
from recipe.async_pipeline.verl_bridge.agent_loop.episodes.episode import (
    END,
    WHY,
    Attempt,
    Ended,
    change_episode,
    current_attempt,
    current_episode,
    episode_with,
)
from recipe.async_pipeline.verl_bridge.agent_loop.episodes.episode_attempts import Episodes

pytestmark = pytest.mark.virtual_time

Step = Callable[[], Awaitable[None]]


def played(
    *attempts: Step,
    timeout_s: float | None = None,
    most: int = 2,
    **policies: Any,
) -> list[Flaw]:
    """Play an episode whose attempts do this, one after the other; all of them have to be played."""
    numbers: list[int] = []

    async def begin(number: int) -> None:
        numbers.append(number)
        await attempts[number - 1]()

    rules = EpisodeRules(most, {**asdict(EndPolicies()), **policies})
    flaws = run_virtual(Episodes(rules, timeout_s, -1.0).play(begin, "a_0"))
    assert numbers == list(range(1, len(attempts) + 1))
    return flaws


def raises(error: BaseException) -> Step:
    async def step() -> None:
        raise error

    return step


def this_attempt() -> Attempt:
    attempt = current_attempt()
    assert attempt is not None
    return attempt


async def succeeds() -> None:
    this_attempt().returned([])


async def hangs() -> None:
    await asyncio.get_running_loop().create_future()


async def scores_for_long() -> None:
    await succeeds()
    await asyncio.sleep(1000)


async def scores_badly() -> None:
    await succeeds()
    raise ValueError("no score")


def rollout_fails(then: BaseException) -> Step:
    async def step() -> None:
        this_attempt().rollout_failed(ConnectionError("no replica"))
        raise then

    return step


def test_an_agent_loop_that_swallows_its_cancellation_is_left_behind_and_not_stored() -> None:
    late: list[str] = []

    async def stubborn() -> None:
        attempt = this_attempt()
        try:
            await hangs()
        except asyncio.CancelledError:
            await asyncio.sleep(100)
        try:
            attempt.returned([])
        except Ended:
            late.append("not stored")

    async def slow() -> None:
        await asyncio.sleep(3)
        await succeeds()
        await asyncio.sleep(1000)  # its scoring has no deadline

    assert played(stubborn, slow, timeout_s=5) == []
    assert late == ["not stored"]


def test_one_that_succeeds_is_played_once() -> None:
    assert played(succeeds) == []


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(3), TimeoutError(), WaitTimeout("inner")])
def test_one_that_fails_is_repeated(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert played(raises(error), succeeds) == []
    assert "episode a_0, attempt 1: " in caplog.text and "; it is repeated" in caplog.text
    assert type(error).__name__ in caplog.text


def test_one_that_fails_in_every_attempt_is_bad_data() -> None:
    (flaw,) = played(*[raises(ValueError("of a\ntool"))] * 3, most=3)
    why = "episode a_0, attempt 3: agent_failed: ValueError: of a tool; see agent_output/a_0-attempt-3.txt"
    assert flaw == Flaw("failed_episode", why)


def test_a_policy_may_drop_at_once() -> None:
    (flaw,) = played(raises(ValueError("x")), agent_failed="drop")
    assert "attempt 1: agent_failed" in flaw.why
    (flaw,) = played(hangs, timeout_s=5, deadline="drop")
    assert "attempt 1: deadline: WaitTimeout" in flaw.why


def test_one_that_hangs_is_ended_and_repeated() -> None:
    ended: list[str] = []

    async def hangs_and_tells() -> None:
        try:
            await hangs()
        finally:
            ended.append("first")

    assert played(hangs_and_tells, succeeds, timeout_s=5) == []
    assert ended == ["first"]


def test_the_deadline_does_not_count_the_scoring() -> None:
    assert played(scores_for_long, timeout_s=5) == []


@pytest.mark.parametrize("error", [ValueError("an agent's own words"), ConnectionError("no replica")])
def test_an_error_of_the_rollout_ends_the_run_also_if_the_agent_raises_another(error: Exception) -> None:
    with pytest.raises(ConnectionError, match="no replica"):
        played(rollout_fails(error))


def test_an_error_of_scoring_ends_the_run() -> None:
    with pytest.raises(ValueError, match="no score"):
        played(scores_badly)


def test_a_rollout_error_that_the_agent_handled_is_forgotten() -> None:
    async def handles() -> None:
        try:
            await rollout_fails(ConnectionError("x"))()
        except ConnectionError:
            await succeeds()

    assert played(handles) == []


async def test_a_cancellation_is_no_failure() -> None:
    rules = EpisodeRules.of(2, EndPolicies())
    begun: list[int] = []

    async def begin(number: int) -> None:
        begun.append(number)
        await hangs()

    playing = asyncio.create_task(Episodes(rules, 5).play(begin, "a_0"))
    await asyncio.sleep(1)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert begun == [1]


async def test_attempts_of_concurrent_episodes_are_separate() -> None:
    seen: list[tuple[str, int]] = []

    def begin(name: str, failures: int) -> Callable[[int], Awaitable[None]]:
        async def play(number: int) -> None:
            await asyncio.sleep(1)
            attempt = this_attempt()
            assert attempt.number == number
            seen.append((name, number))
            if number <= failures:
                raise ValueError(name)
            attempt.returned([])

        return play

    episodes = Episodes(EpisodeRules.of(3, EndPolicies()), None)
    found = await asyncio.gather(*(episodes.play(begin(n, f), n) for n, f in (("a", 0), ("b", 2))))
    assert found == [[], []] and current_attempt() is None
    assert sorted(seen) == [("a", 1), ("b", 1), ("b", 2), ("b", 3)]


# Ends that the agent loop knows.


class Response:
    """Has the fields of verl's AgentLoopOutput that count here."""

    def __init__(self, end: str | None = None) -> None:
        self.reward_score = 0.25
        self.extra_fields = {"kept": 1} if end is None else {"kept": 1, END: end, WHY: "why"}


def returns(*ends: str | None, stored: list[tuple[str, float]]) -> list[Step]:
    """Attempts that end in these ways; the responses that are stored are noted."""

    def step(end: str | None) -> Step:
        async def play() -> None:
            attempt, response = this_attempt(), Response(end)
            attempt.returned([Response("cut_off"), response])
            assert response.extra_fields == {"kept": 1}
            stored.append((attempt.end, response.reward_score))

        return play

    return [step(end) for end in ends]


@pytest.mark.parametrize(
    ("ends", "policies", "found"),
    [
        ([None], {}, [("done", 0.25)]),
        (["turns"], {}, [("turns", 0.25)]),
        (["turns"], {"turns": "score"}, [("turns", -1.0)]),
        (["env_failed", "invalid"], {}, [("invalid", 0.25)]),
        (["env_failed"], {"env_failed": "score"}, [("env_failed", -1.0)]),
    ],
)
def test_a_response_is_trained_scored_or_played_again(
    ends: list[str | None], policies: dict[str, Any], found: list[tuple[str, float]]
) -> None:
    stored: list[tuple[str, float]] = []
    assert played(*returns(*ends, stored=stored), **policies) == []
    assert stored == found


@pytest.mark.parametrize(("ends", "policy"), [(["env_failed"] * 2, "again"), (["env_failed"], "drop")])
def test_a_response_that_is_not_trained_is_not_stored(ends: list[str | None], policy: str) -> None:
    stored: list[tuple[str, float]] = []
    (flaw,) = played(*returns(*ends, stored=stored), env_failed=policy)
    assert flaw.why.startswith(f"episode a_0, attempt {len(ends)}: env_failed: why; see ") and stored == []


def test_an_environment_that_fails_before_anything_was_written_cannot_be_scored() -> None:
    failing = raises(EnvironmentFailed("reset: no"))
    (flaw,) = played(failing, failing, env_failed="score")
    assert flaw.why.startswith("episode a_0, attempt 2: env_failed: EnvironmentFailed: reset: no; see ")


def test_time_that_is_excused_does_not_count() -> None:
    async def waits() -> None:
        attempt = this_attempt()
        await asyncio.sleep(3)
        with attempt.excused():
            await asyncio.sleep(100)
        await asyncio.sleep(2.5 if attempt.number == 1 else 1.5)
        attempt.returned([])
        waited.append(attempt.waited_s)

    waited: list[float] = []
    assert played(waits, waits, timeout_s=5) == []
    assert waited == [100.0]


@pytest.mark.parametrize("timeout_s", [None, 10])
def test_an_attempt_tells_how_much_time_is_left(timeout_s: float | None) -> None:
    async def waits() -> None:
        attempt = this_attempt()
        left.append(attempt.seconds_left())
        await asyncio.sleep(3)
        with attempt.excused():
            await asyncio.sleep(100)
            left.append(attempt.seconds_left())
        await asyncio.sleep(1)
        left.append(attempt.seconds_left())

    left: list[float | None] = []
    assert played(waits, timeout_s=timeout_s) == []
    assert left == ([None] * 3 if timeout_s is None else [10, 7, 6])


def test_failed_attempts_are_handed_over_with_their_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episode_attempts, "without_secrets", lambda text: text.replace("swordfish-7", "***"))

    async def hangs() -> None:
        attempt = this_attempt()
        attempt.log = OutputLog()
        attempt.log.write(f"attempt {attempt.number} swordfish-7\n".encode())
        await asyncio.sleep(100)

    async def silent() -> None:
        attempt = this_attempt()
        attempt.log = OutputLog()
        raise ValueError("a bug")

    async def fine() -> None:
        attempt = this_attempt()
        attempt.log = OutputLog()
        attempt.log.write(b"not kept")
        attempt.returned([])

    failed: list[FailedAttempt] = []
    steps = iter([hangs, silent, fine])
    episodes = Episodes(EpisodeRules.of(3, EndPolicies()), 5)
    assert run_virtual(episodes.play(lambda number: next(steps)(), "a_0", failed.append)) == []
    late, silent_one = failed
    assert (late.episode, late.attempt, late.end) == ("a_0", 1, "deadline")
    assert late.output == "attempt 1 ***\n"
    assert silent_one == FailedAttempt("a_0", 2, "agent_failed", "ValueError: a bug", "")


def test_a_task_inherits_the_episode_and_changes_only_its_own() -> None:
    async def child() -> tuple[Any, Any]:
        inherited = current_episode().admitted
        change_episode(admitted=9)
        return inherited, current_episode().admitted

    async def parent() -> None:
        change_episode(admitted=4)
        assert await asyncio.create_task(child()) == (4, 9)
        assert current_episode().admitted == 4
        with episode_with(validates=True, admitted=5):
            assert (current_episode().validates, current_episode().admitted) == (True, 5)
        assert (current_episode().validates, current_episode().admitted) == (False, 4)

    asyncio.run(parent())
    assert current_episode().admitted is None
