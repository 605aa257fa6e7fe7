# SPDX-License-Identifier: Apache-2.0
"""One session: what an agent may do with its two keys while it plays an episode.

    model key      requests to the policy: the agent has it
    control key    the reward and the end: the agent does not have it, so it cannot write its own reward

    OPEN ──► a request ──► chains: known tokens ──► new ones appended ──► engine ──► answer, chains grow
      │        └ sent again by a client that gave up waiting: joins the request, or gets its answer again
      └──► ended(reason): requests in flight are given up, later ones get 410 with the reason

A request is not given up when its client hangs up, because clients that time out try again.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import secrets
import time
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from ..core.deadline import within
from ..errors import RequestRefused, WaitTimeout
from .chains import ChainRow, Chains, Completion, OpenRequest
from .conversation import Message, Said
from .turn_rewards import TurnRewards

DONE, RECALLED = "done", "recalled"
"""Reasons that agents read, named as the ends of their episodes in `agents.episodes`."""
UNAVAILABLE = 503
"""Status of the refusal of a request whose session is ending after an error of the rollout."""


class CannotAppend(ValueError):  # noqa: N818 - a condition of a model's template, not a failure
    """The chat template cannot append these messages to a conversation that was begun."""


class SessionEngine(Protocol):
    """What answers the requests of a session: a tokenizer and the engines."""

    @property
    def vocabulary(self) -> int:
        """Return how many tokens the model has; engines fail at other ids."""

    async def begin(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the tokens of a whole request. Raises RequestRefused if the chat template refuses it."""

    async def append(
        self,
        previous: Sequence[Message],
        new: Sequence[Message],
        token_ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]],
    ) -> tuple[list[int], int]:
        """Return `token_ids`, the tokens of `previous`, with new messages, and how many of them were kept.

        The last message of `previous` may lack its end: a limit of the agent has ended it.
        Raises CannotAppend, and as `begin`.
        """

    async def generate(
        self, request_id: str, token_ids: Sequence[int], max_tokens: int, stop: Sequence[str]
    ) -> Completion:
        """Have an engine answer. The run's sampling parameters apply. Errors end the run."""

    async def read(
        self, token_ids: Sequence[int], tools: Sequence[Mapping[str, Any]], stop: Sequence[str]
    ) -> Said:
        """Return an answer as text and tool calls."""


class Ask(NamedTuple):
    """A request for a turn, in any dialect."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    """As OpenAI's chat API has them."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    overridden: tuple[str, ...] = ()
    """Sampling parameters that the agent named; the run's apply."""


class Reply(NamedTuple):
    """The answer to a request."""

    id: str
    said: Said
    finish: Literal["stop", "length", "tool_calls"]
    prompt_tokens: int
    tokens: int


class TokenReply(NamedTuple):
    """The answer to a request that sent tokens."""

    token_ids: list[int]
    log_probs: list[float] | None
    versions: list[int]
    """Of each token."""
    finish: Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True)
class SessionLimits:
    """What a session may use."""

    prompt_tokens: int
    response_tokens: int
    max_turns: int = 16
    max_chains: int = 8
    turn_timeout_s: float | None = None
    turn_rewards: bool = False
    """Turns may have rewards: there is one conversation, and the estimator reads rewards by token."""


@dataclass
class Counts:
    """What happened in a session."""

    turns: int = 0
    coalesced: int = 0
    """Requests that were sent again and cost no generation."""
    overridden: int = 0
    """Requests that named sampling parameters."""
    tokenized_again: int = 0
    """Requests whose messages could not be appended to the tokens of their history."""


@dataclass(frozen=True)
class Keys:
    """The two keys of a session, 256 random bits each."""

    model: str = field(default_factory=lambda: "sk-model-" + secrets.token_urlsafe(32), repr=False)
    control: str = field(default_factory=lambda: "sk-control-" + secrets.token_urlsafe(32), repr=False)


class Session:
    """One episode of an agent. Belongs to the event loop and the context that it was made in."""

    def __init__(
        self,
        policy: SessionEngine,
        limits: SessionLimits,
        seconds_left: Callable[[], float | None] = lambda: None,
    ) -> None:
        """`seconds_left`: until the deadline of the episode; None without one."""
        self.seconds_left = seconds_left
        self.keys, self.counts = Keys(), Counts()
        self.chains = Chains(limits.max_chains)
        self.reward: float | None = None
        """What the holder of the control key wrote last, besides `turn_rewards`."""
        self.turn_rewards = TurnRewards(allowed=limits.turn_rewards)
        self.ended: str | None = None
        """Why the session has ended."""
        self.limit_hit = ""
        """The limit that a request exceeded; empty if one that began later was answered."""
        self.cut_off = False
        """Whether the limits of the run cut the last answer off."""
        self.took_ms: list[float] = []
        """Of each answered request, what the gateway added to the time of the engines."""
        loop = asyncio.get_running_loop()
        self.over: asyncio.Future[None] = loop.create_future()
        """Done when the session has ended, with the error that ended it, if one did."""
        self._policy, self._limits = policy, limits
        # Turns count as parts of the episode, not of the HTTP server that they arrive at.
        self._context = contextvars.copy_context()
        self._open: dict[bytes, asyncio.Future[Any]] = {}
        self._tasks: set[asyncio.Future[Any]] = set()
        self._served: dict[bytes, Any] = {}
        """The last answer to each request, by its digest: at most `max_turns`."""
        self._limits_hit = 0
        """Requests that were refused at a limit."""

    async def turn(self, ask: Ask, received: float | None = None) -> Reply:
        """Answer a request. `received`: when its body had arrived, by `time.perf_counter`; default: now.

        Raises RequestRefused; other errors have ended the session.
        """
        received = time.perf_counter() if received is None else received
        if ask.messages[-1]["role"] == "assistant":
            raise RequestRefused(
                "the last message must not be the assistant's: the policy writes whole turns"
            )
        self.counts.overridden += bool(ask.overridden)
        self._count_turn()
        tools = _hashable(ask.tools)
        request = self.chains.open(ask.messages, tools)
        try:
            try:
                token_ids, kept = await self._tokens(request, ask)
            except CannotAppend:
                self.counts.tokenized_again += 1
                request.abandon()
                request = self.chains.open(ask.messages, tools, from_scratch=True)
                token_ids, kept = await self._tokens(request, ask)
            answer, engine_s = await self._answer(request, token_ids, ask.max_tokens, ask.stop)
            said = await self._policy.read(answer.token_ids, ask.tools, ask.stop)
            if answer.token_ids:
                request.commit(token_ids, kept, answer, said.as_message())
        finally:
            request.abandon()
        name = secrets.token_hex(12)
        self._answered(time.perf_counter() - received - engine_s, name, len(token_ids), answer)
        cut = not answer.whole and said.stop is None
        return Reply(
            id=name,
            said=said,
            finish="tool_calls" if said.calls else "length" if cut else "stop",
            prompt_tokens=len(token_ids),
            tokens=len(answer.token_ids),
        )

    async def turn_of_tokens(
        self,
        token_ids: list[int],
        max_tokens: int | None,
        stop: tuple[str, ...] = (),
        received: float | None = None,
    ) -> TokenReply:
        """Answer a request that sends tokens, as `turn`. Raises as `turn`."""
        received = time.perf_counter() if received is None else received
        if not token_ids:
            raise RequestRefused("prompt_ids must have at least one token, got none")
        known = self._policy.vocabulary
        for one in (min(token_ids), max(token_ids)):
            if not 0 <= one < known:
                raise RequestRefused(f"prompt_ids must be between 0 and {known - 1}, got {one}")
        self._count_turn()
        request = self.chains.open_tokens(token_ids)
        try:
            answer, engine_s = await self._answer(request, token_ids, max_tokens, stop)
            if answer.token_ids:
                request.commit(token_ids, len(request.known), answer, None)
        finally:
            request.abandon()
        self._answered(time.perf_counter() - received - engine_s, "", len(token_ids), answer)
        versions = [
            max((start, version) for version, start in answer.spans if start <= at)[1]
            for at in range(len(answer.token_ids))
        ]
        log_probs = None if answer.log_probs is None else list(answer.log_probs)
        return TokenReply(list(answer.token_ids), log_probs, versions, "stop" if answer.whole else "length")

    async def once(self, digest: bytes, begin: Callable[[], Awaitable[Any]], *, again: bool) -> Any:
        """Return what `begin` returns. `digest`: of the request; `again`: the client sent it before.

        A request that was sent before joins the one in flight, or gets the last answer again. One that was
        not is new, also if its body is equal: agents sample twice on purpose. Raises RequestRefused if the
        session has ended, and what `begin` raises.
        """
        self.check_open()
        task = self._open.get(digest) if again else None
        if task is None and again and digest in self._served:
            self.counts.coalesced += 1
            return self._served[digest]
        if task is None:
            task = self._context.run(asyncio.ensure_future, self._bounded(begin))
            self._open[digest] = task
            self._tasks.add(task)
            task.add_done_callback(lambda done: self._settle(digest, done))
        else:
            self.counts.coalesced += 1
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            # The session has ended meanwhile, or the caller has.
            self.check_open()
            raise

    def check_open(self) -> None:
        """Raises RequestRefused if the session has ended."""
        if self.ended is not None:
            raise ended(self.ended)

    def end(self, reason: str = DONE, error: BaseException | None = None) -> None:
        """End the session: give up requests in flight and refuse others. Only the first call counts."""
        if self.ended is not None:
            return
        self.ended = reason
        if error is None:
            self.over.set_result(None)
        else:
            self.over.set_exception(error)
            self.over.exception()  # it is read by the owner, if at all
        for task in self._tasks - {asyncio.current_task()}:
            task.cancel()

    async def close(self, reason: str = DONE) -> None:
        """End the session and wait until the requests in flight have ended."""
        self.end(reason)
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    def rows(self) -> list[ChainRow]:
        """Return what is to be trained, the row of the last answer last."""
        return self.chains.rows(self._limits.prompt_tokens)

    async def _bounded(self, begin: Callable[[], Awaitable[Any]]) -> Any:
        before = self._limits_hit
        try:
            answer = await within(
                begin(), self._limits.turn_timeout_s, owner="a session", what="the policy to answer"
            )
            # A request that was in flight at the refusal does not show that the agent copes with it.
            if self._limits_hit == before:
                self.limit_hit = ""
            return answer
        except RequestRefused as error:
            self.limit_hit = error.end or self.limit_hit
            self._limits_hit += bool(error.end)
            raise
        except WaitTimeout as error:
            self.end("deadline", error)
            raise ended("deadline") from error
        except Exception as error:  # noqa: BLE001 - handed to the owner of the session
            raise self._failed(error) from error

    def _failed(self, error: BaseException) -> RequestRefused:
        self.end("failed", error)
        return RequestRefused("the policy cannot answer: the episode is ending", status=UNAVAILABLE)

    def _settle(self, digest: bytes, task: asyncio.Future[Any]) -> None:
        self._tasks.discard(task)
        if self._open.get(digest) is task:
            del self._open[digest]
        if not task.cancelled() and task.exception() is None:
            self._served[digest] = task.result()

    def _count_turn(self) -> None:
        if self.counts.turns + len(self._tasks) > self._limits.max_turns:
            raise RequestRefused(
                f"this session has used its {self._limits.max_turns} turns (agentic.max_turns)", end="turns"
            )

    def _answered(self, took_s: float, name: str, start: int, answer: Completion) -> None:
        self.counts.turns += 1
        self.turn_rewards.answered(name, start, start + len(answer.token_ids))
        self.took_ms.append(round(1e3 * took_s, 3))

    async def _tokens(self, request: OpenRequest, ask: Ask) -> tuple[list[int], int]:
        if not request.known:
            return await self._policy.begin(request.new, ask.tools), 0
        return await self._policy.append(request.previous, request.new, request.known, ask.tools)

    async def _answer(
        self, request: OpenRequest, token_ids: Sequence[int], max_tokens: int | None, stop: Sequence[str]
    ) -> tuple[Completion, float]:
        """Return the engine's answer and the seconds that it took."""
        if max_tokens is not None and max_tokens < 1:
            raise RequestRefused(f"max_tokens must be >= 1, got {max_tokens}")
        if not token_ids:
            raise RequestRefused("the messages must have a text, got none: the chat template writes no token")
        limits = self._limits
        room = request.room(len(token_ids), limits.prompt_tokens, limits.response_tokens)
        if room < 1:
            raise RequestRefused(
                f"context_length_exceeded: the request has {len(token_ids)} tokens, which leaves no room for "
                f"an answer (data.max_prompt_length {limits.prompt_tokens}, data.max_response_length "
                f"{limits.response_tokens})",
                end="tokens",
            )
        limit = room if max_tokens is None else min(room, max_tokens)
        asked = time.perf_counter()
        try:
            answer = await self._policy.generate(request.chain.request_id, token_ids, limit, stop)
        except RequestRefused:
            raise
        except Exception as error:  # noqa: BLE001 - handed to the owner of the session
            # Here, so that a deadline inside the rollout is not taken for the one of the turn.
            raise self._failed(error) from error
        engine_s = time.perf_counter() - asked
        self.cut_off = not answer.whole and len(answer.token_ids) >= room
        return answer, engine_s


def ended(reason: str) -> RequestRefused:
    """Return the refusal of a request to a session that has ended."""
    return RequestRefused(f"the session has ended: {reason}", status=410)


def digest_of(*parts: bytes) -> bytes:
    """Return what tells requests apart."""
    made = hashlib.blake2b(digest_size=16)
    for part in parts:
        made.update(len(part).to_bytes(8, "big") + part)
    return made.digest()


def _hashable(value: Any) -> Hashable:
    if isinstance(value, Mapping):
        return tuple((name, _hashable(one)) for name, one in sorted(value.items()))
    return tuple(map(_hashable, value)) if isinstance(value, list | tuple) else value
