# SPDX-License-Identifier: Apache-2.0
"""Play an episode again if its agent loop fails or takes too long, without its group.

    begin() ─► agent loop ─► its response, and how the episode ended ─► scoring and storing
               │             └─ train, score, again or drop             errors end the run
               ├─ an error of the rollout client ends the run
               ├─ EnvironmentFailed: env_failed; another error: agent_failed
               └─ too long, or a turn or tool call of it: deadline

The ends and the decision about each are in `agents.episodes`. An agent loop that knows how its episode ended
puts it into `extra_fields`, under END; of others, each response is `done`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from ...agents.episodes import DONE, FAILED_EPISODE, Action, EpisodeRules
from ...agents.output_log import OutputLog
from ...core.bad_data import Flaw
from ...core.deadline import within
from ...errors import EnvironmentFailed, WaitTimeout
from ...observe.agent_output import FOLDER, FailedAttempt, name_of
from ...redaction import without_secrets
from ..ray_calls import cause_of

T = TypeVar("T")
logger = logging.getLogger(__name__)
REASON_CHARACTERS = 500
"""Length of the reason that a failed episode is reported with."""


END, WHY, NOTED, TOOK_MS = "episode_end", "episode_end_why", "episode_counts", "gateway_ms"
"""Fields with which an agent loop tells how its episode ended, why, what happened in it (see
`agents.episodes.COUNTS`), and what the gateway added to each of its requests.
"""


class Ended(Exception):  # noqa: N818 - no error, but the way out of verl's worker
    """The response of an attempt is not stored."""


class Attempt:
    """One attempt at an episode, and what its parts note about it."""

    def __init__(self, number: int, episodes: Episodes) -> None:
        self.number = number
        self.end = DONE
        self.why = ""
        self.action: Action = "train"
        self.counts: Mapping[str, int] = {}
        self.took_ms: Sequence[float] = ()
        self.log: OutputLog | None = None
        """What its commands write."""
        self.waited_s = 0.0
        """Seconds of the agent loop that were not the episode's, such as the wait for an environment."""
        self._episodes = episodes
        self._rollout_error: Exception | None = None
        self._late: WaitTimeout | None = None
        self._scoring = False
        self._excused_s = 0.0
        self._excused_since: float | None = None
        self._began: float | None = None

    def begin(self) -> None:
        """Start its time."""
        self._began = _now()

    def seconds_left(self) -> float | None:
        """Return the seconds until its deadline; None without one."""
        limit_s = self._episodes.timeout_s
        if limit_s is None or self._began is None:
            return None
        return max(0.0, limit_s - (_now() - self._began - self.excused_s()))

    def returned(self, responses: Sequence[Any]) -> None:
        """Take what the agent loop returned: what follows has no deadline, and its errors end the run.

        `responses` are verl's AgentLoopOutputs, of which the last one is scored. Raises Ended if they are not
        trained, or if a turn or a tool call was too slow, also if the agent loop ignored that.
        """
        if self._late is not None:
            self._judge_late(self._late)
            raise Ended
        for one in responses[-1:]:
            self.end, self.why = one.extra_fields.pop(END, DONE), one.extra_fields.pop(WHY, "")
            self.counts, self.took_ms = one.extra_fields.pop(NOTED, {}), one.extra_fields.pop(TOOK_MS, ())
            self._judge(written=True)
            if self.action in ("again", "drop"):
                raise Ended
            if self.action == "score":
                one.reward_score = self._episodes.failure_reward
        self._scoring, self.waited_s = True, self.excused_s()
        self._excused_since = _now()

    async def within(self, awaitable: Awaitable[T], timeout_s: float | None, *, what: str) -> T:
        """Await a part of the episode for at most `timeout_s` seconds (None: no limit).

        Raises WaitTimeout if that is exceeded, after which the attempt ends as `deadline`.
        """
        if timeout_s is None:
            return await awaitable
        raised: list[BaseException] = []

        async def noted() -> T:
            try:
                return await awaitable
            except Exception as error:
                raised.append(error)
                raise

        try:
            return await within(noted(), timeout_s, owner="an agent loop", what=what)
        except WaitTimeout as error:
            if not raised:
                self._late = error
            raise

    @property
    def is_late(self) -> bool:
        """Whether a part of the episode exceeded its time."""
        return self._late is not None

    @contextmanager
    def excused(self) -> Iterator[None]:
        """Leave the time inside the context out of the deadline."""
        self._excused_since = _now()
        try:
            yield
        finally:
            self._excused_s, self._excused_since = self.excused_s(), None

    def excused_s(self) -> float:
        """Return the seconds so far that the deadline does not include."""
        since = self._excused_since
        return self._excused_s + (0.0 if since is None else _now() - since)

    async def turn(self, answering: Awaitable[T]) -> T:
        """Await the policy's answer to a request. Raises as `within`."""
        what = "a turn of the policy (agentic.turn_timeout_s)"
        return await self.within(answering, self._episodes.turn_timeout_s, what=what)

    def rollout_failed(self, error: Exception) -> None:
        """Note an error of the rollout client, which is no fault of the episode."""
        self._rollout_error = error

    def failed(self, error: BaseException) -> None:
        """Judge the attempt by its error. Raises the error that should end the run."""
        if isinstance(error, Ended):
            return
        if self._late is not None:
            self._judge_late(self._late)
            return
        if self._rollout_error is not None:
            raise self._rollout_error
        if self._scoring:
            raise error
        self.end = next((end for kind, end in END_OF.items() if isinstance(error, kind)), "agent_failed")
        cause = cause_of(error)
        self.why = f"{type(cause).__name__}: {cause}"
        self._judge(written=False)

    def _judge_late(self, late: WaitTimeout) -> None:
        self.end, self.why = "deadline", str(late)
        self._judge(written=False)

    def _judge(self, *, written: bool) -> None:
        self.action = self._episodes.rules.judge(self.end, self.number, written=written)


END_OF: Mapping[type[BaseException], str] = {EnvironmentFailed: "env_failed", WaitTimeout: "deadline"}
"""Errors that are not `agent_failed`."""


def _now() -> float:
    return asyncio.get_running_loop().time()


_attempt: ContextVar[Attempt | None] = ContextVar("attempt at the episode of this task", default=None)


def current_attempt() -> Attempt | None:
    """Return the attempt of this task; None in validation, which does not repeat episodes."""
    return _attempt.get()


@contextmanager
def _as_current(attempt: Attempt) -> Iterator[None]:
    token = _attempt.set(attempt)
    try:
        yield
    finally:
        _attempt.reset(token)


class Episodes:
    """Plays the episodes of a run."""

    def __init__(
        self,
        rules: EpisodeRules,
        timeout_s: float | None = None,
        failure_reward: float = 0.0,
        turn_timeout_s: float | None = None,
    ) -> None:
        """`timeout_s`: seconds for one attempt, without its scoring, and `turn_timeout_s` for each of its
        requests; None for no limit.
        """
        self.rules, self.failure_reward = rules, failure_reward
        self.turn_timeout_s = turn_timeout_s
        self.timeout_s = timeout_s

    async def play(
        self,
        begin: Callable[[int], Awaitable[None]],
        name: str,
        failed: Callable[[FailedAttempt], object] = lambda attempt: None,
    ) -> list[Flaw]:
        """Play an episode until an attempt is not to be repeated; `begin(number)` plays one.

        Returns the flaw of an episode that failed in its last attempt. Raises errors of the rollout, of
        scoring and of storing. `name` is for messages; `failed` gets each failed attempt.
        """
        number = 1
        while True:
            attempt = Attempt(number, self)
            await self._play(attempt, begin)
            if attempt.action in ("train", "score"):
                return []

            reason = _in_words(attempt.why)
            # Also without output: the reason, such as what an external runner reports, is in no other file.
            output = "" if attempt.log is None else without_secrets(attempt.log.text())
            failed(FailedAttempt(name, number, attempt.end, reason, output))
            why = f"episode {name}, attempt {number}: {attempt.end}: {reason}"
            if attempt.action == "drop":
                return [Flaw(FAILED_EPISODE, f"{why}; see {FOLDER}/{name_of(name, number)}")]
            logger.warning("%s; it is repeated", why)
            number += 1

    async def _play(self, attempt: Attempt, begin: Callable[[int], Awaitable[None]]) -> None:
        attempt.begin()
        with _as_current(attempt):
            try:
                await within(
                    begin(attempt.number),
                    self.timeout_s,
                    owner="an agent loop",
                    what="an episode to end (agentic.episode_timeout_s)",
                    excused_s=attempt.excused_s,
                )
            # A tool that calls exit() must not end the process of all agent loops.
            except (Exception, SystemExit) as error:  # noqa: BLE001 - the agent's code may raise anything
                attempt.failed(error)
                if attempt.end == "agent_failed":
                    logger.warning("an agent loop failed", exc_info=error)


def _in_words(text: str) -> str:
    return without_secrets(" ".join(text.split()))[:REASON_CHARACTERS]
