# SPDX-License-Identifier: Apache-2.0
"""What the code on both sides of verl's loops knows of the episode that it works on.

verl's loop, agent loop and client lie between this package's worker, its checks, its client of the rollout
servers and its sample store, and pass nothing on. So a task has a record of its episode, which the tasks that
it starts inherit.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from ....agents.episodes import DONE, Action, EpisodeRules
from ....agents.processes.commands import OutputLog
from ....core.groups.bad_data import Flaw
from ....core.groups.items import spans_of
from ....core.waits.deadline import GRACE_S, within
from ....core.waits.threads import in_new_thread
from ....errors import EnvironmentFailed, RolloutError, WaitTimeout
from ...calls.ray_calls import cause_of
from ..tokens.version_spans import ResponseTurn

T = TypeVar("T")
END, WHY, NOTED, TOOK_MS = "episode_end", "episode_end_why", "episode_counts", "gateway_ms"
"""Fields with which an agent loop tells how its episode ended, why, what happened in it (see
`agents.episodes.COUNTS`), and what the gateway added to each of its requests.
"""


class EpisodeLimits(NamedTuple):
    """What holds for each attempt at an episode of a run."""

    rules: EpisodeRules
    timeout_s: float | None = None
    """Seconds for one attempt, without its scoring; None for no limit."""
    failure_reward: float = 0.0


class Ended(Exception):  # noqa: N818 - no error, but the way out of verl's worker
    """The response of an attempt is not stored."""


class Attempt:
    """One attempt at an episode, and what its parts note about it."""

    def __init__(self, number: int, limits: EpisodeLimits) -> None:
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
        self._limits = limits
        self._rollout_error: Exception | None = None
        self._late: WaitTimeout | None = None
        self._scoring = self._failed = False
        self._excused_s = 0.0
        self._excused_since: float | None = None
        self._began: float | None = None

    def begin(self) -> None:
        """Start its time."""
        self._began = _now()

    def seconds_left(self) -> float | None:
        """Return the seconds until its deadline; None without one."""
        limit_s = self._limits.timeout_s
        if limit_s is None or self._began is None:
            return None
        return max(0.0, limit_s - (_now() - self._began - self.excused_s()))

    def returned(self, responses: Sequence[Any]) -> None:
        """Take what the agent loop returned: what follows has no deadline, and its errors end the run.

        `responses` are verl's AgentLoopOutputs, of which the last one is scored. Raises Ended if they are not
        trained, or if a tool call was too slow, also if the agent loop ignored that; so if it was
        left running after the deadline of the episode.
        """
        if self._failed:
            raise Ended
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
                one.reward_score = self._limits.failure_reward
        self._scoring, self.waited_s = True, self.excused_s()
        self._excused_since = _now()

    async def within(
        self, awaitable: Awaitable[T], timeout_s: float | None, *, what: str, grace_s: float | None = None
    ) -> T:
        """Await a part of the episode for at most `timeout_s` seconds (None: no limit), as `deadline.within`.

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
            return await within(noted(), timeout_s, owner="an agent loop", what=what, grace_s=grace_s)
        except WaitTimeout as error:
            if not raised:
                self._late = error
            raise

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

    def rollout_failed(self, error: Exception) -> None:
        """Note an error of the rollout client, which is no fault of the episode."""
        self._rollout_error = error

    def failed(self, error: BaseException) -> None:
        """Judge the attempt by its error. Raises the error that should end the run."""
        if isinstance(error, Ended):
            return
        self._failed = True
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
        self.action = self._limits.rules.judge(self.end, self.number, written=written)


END_OF: Mapping[type[BaseException], str] = {EnvironmentFailed: "env_failed", WaitTimeout: "deadline"}
"""Errors that are not `agent_failed`."""


def _now() -> float:
    return asyncio.get_running_loop().time()


Store = Callable[[list[str], list[dict[str, Any]], list[dict[str, Any]], str], Awaitable[None]]
"""Stores trajectories, which have keys, fields, tags and a partition."""


@dataclass(frozen=True, kw_only=True)
class Episode:
    """The episode of a task, as far as its parts have told. Outside of training most of it stays unknown."""

    admitted: int | None = None
    """The version with which its group began: a replica that serves an older one refuses its requests."""
    attempt: Attempt | None = None
    flaws: list[Flaw] | None = None
    """What is wrong with its response; None in validation, where every response passes."""
    turns: list[ResponseTurn] | None = None
    """Its requests so far, of all of its tasks."""
    began: float = 0.0
    """When the attempt began, by `time.perf_counter`."""
    cost: dict[str, float] | None = None
    """See `version_spans.costs_of`."""
    times: Sequence[Sequence[float]] = ()
    """See `version_spans.times_of`."""
    waits: tuple[float, float] | None = None
    """See `version_spans.waits_of`."""
    validates: bool = False
    """verl passes it on neither to agent loops nor to scoring."""
    store: Store | None = None
    """Takes its trajectories in place of TransferQueue."""
    columns: Sequence[Mapping[str, torch.Tensor]] = ()
    """Further columns of its rows in the sample store."""


_EPISODE: ContextVar[Episode] = ContextVar("the episode of this task", default=Episode())  # noqa: B039 - frozen


def current_episode() -> Episode:
    """Return the episode of this task."""
    return _EPISODE.get()


def current_attempt() -> Attempt | None:
    """Return the attempt of this task; None outside of an episode."""
    return _EPISODE.get().attempt


def change_episode(**changes: Any) -> None:
    """Change fields of the episode, for this task and the tasks that it starts afterwards."""
    _EPISODE.set(replace(_EPISODE.get(), **changes))


@contextmanager
def episode_with(**changes: Any) -> Iterator[None]:
    """Change fields of the episode inside, in this task; afterwards all fields are as before."""
    token = _EPISODE.set(replace(_EPISODE.get(), **changes))
    try:
        yield
    finally:
        _EPISODE.reset(token)


@contextmanager
def kept_turns() -> Iterator[list[ResponseTurn]]:
    """Collect the turns that are taken inside, by this task and its child tasks."""
    turns: list[ResponseTurn] = []
    with episode_with(turns=turns):
        yield turns


def taken_turns() -> list[ResponseTurn]:
    """Return the turns so far; empty outside of `kept_turns`."""
    return list(_EPISODE.get().turns or ())


def take_turn(
    prompt_tokens: int,
    spans: Sequence[Sequence[int]] | None,
    replica: str = "",
    tokens: int = 0,
    seconds: float = 0.0,
    began: float = 0.0,
) -> None:
    """Record the output of a request. An output without versions is not recorded."""
    turns = _EPISODE.get().turns
    if turns is not None and spans:
        turns.append(ResponseTurn(prompt_tokens, spans_of(spans), replica, tokens, seconds, began))


def place_of(row: Mapping[str, Any]) -> int | str:
    """Return the row's index in the data, or a digest of its prompt and task if the data have none.

    verl gives index 0 to all rows without `extra_info.index`, whose seeds would be the same.
    """
    info = row.get("extra_info") or {}
    index = row.get("index")
    if index is not None and (index != 0 or "index" in info):
        return int(index) if isinstance(index, int | np.integer) else str(index)
    content = [list(row.get("raw_prompt", ())), info.get("task")]
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


CallTool = Callable[..., Awaitable[Any]]


def limited(call: CallTool, timeout_s: float | None) -> CallTool:
    """Return verl's `_call_tool`, but with a deadline, after which the episode ends as `deadline`.

    `timeout_s`: seconds for one call, None for no limit.
    Validation has the same deadline; its error is a WaitTimeout. Raises RolloutError if the tool called
    exit(), which in a separate task would end the process of all agent loops.
    """

    @wraps(call)
    async def call_tool(loop: Any, tool_call: Any, *args: Any, **kwargs: Any) -> Any:
        attempt = current_attempt()
        what = f"the tool {tool_call.name} to return (agentic.tool_timeout_s)"
        try:
            calling = call(loop, tool_call, *args, **kwargs)
            if attempt is None:
                return await within(calling, timeout_s, owner="an agent loop", what=what, grace_s=GRACE_S)
            return await attempt.within(calling, timeout_s, what=what, grace_s=GRACE_S)
        except SystemExit as error:
            raise RolloutError(f"the tool {tool_call.name} called exit({error.code})") from error

    return call_tool


async def call_function(tool: Any, parameters: dict[str, Any]) -> Any:
    """Call a tool that is a function, as verl does, but a plain one in a separate thread.

    A thread that hangs is left behind: it holds up no other tool, nor the end of the process.
    """
    if tool.is_async:
        return await tool.fn(**parameters)
    found = await in_new_thread(lambda: tool.fn(**parameters), f"tool {tool.name}")
    # A plain decorator around an async function hides that it is one.
    return await found if inspect.isawaitable(found) else found
