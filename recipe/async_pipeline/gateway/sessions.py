# SPDX-License-Identifier: Apache-2.0
"""One session: what an agent may do with its two keys while it plays an episode.

model key      requests to the policy: the agent has it
control key    the reward and the end: the agent does not have it, so it cannot write its own reward

OPEN ──► a request ──► chains: known tokens ──► new ones appended ──► engine ──► answer, chains grow
  │        └ sent again by a client that gave up waiting: joins the request, or gets its answer again
  └──► ended(reason): requests in flight are given up, later ones get 410 with the reason
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import RequestRefused
from .chains import AnswerPlace, ChainRow, Chains, Completion, OpenRequest
from .conversation import hashable, pictures_of
from .turns import (
    Ask,
    CannotAppend,
    ContinuedText,
    Deliveries,
    Reply,
    SessionEngine,
    TokenReply,
    TurnRewards,
    reply_of,
    without_prefill,
)

DONE, RECALLED = "done", "recalled"
"""Reasons that agents read, named as the ends of their episodes in `agents.episodes`."""
UNAVAILABLE = 503
"""Status of the refusal of a request whose session is ending after an error of the rollout."""


@dataclass(frozen=True, kw_only=True)
class SessionLimits:
    """What a session may use."""

    prompt_tokens: int
    response_tokens: int
    max_turns: int = 16
    max_chains: int = 16
    main_model: str | None = None
    """The model name of the main conversation; None for the one of the first request."""
    auxiliary: bool = True
    """Conversations that are not the main one are rows, too."""
    turn_rewards: bool = False
    """Turns may have rewards: there is one conversation, and the estimator reads rewards by token."""


@dataclass
class Counts:
    """What happened in a session."""

    turns: int = 0
    coalesced: int = 0
    """Requests that were sent again and cost no generation."""
    constrained: int = 0
    """Requests whose answer had to have a form."""
    overridden: int = 0
    """Requests with parameters that have no effect."""
    ignored: Counter[str] = field(default_factory=Counter)
    """The same, by the name of the parameter."""
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
        self.deliveries = Deliveries()
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
        self._texts = ContinuedText()
        self._waiting: Counter[asyncio.Future[Any]] = Counter()
        """Callers that wait for a request. A task without any has no entry."""
        self._first_model: str | None = None
        self._limits_hit = 0
        """Requests that were refused at a limit."""

    async def turn(self, ask: Ask, received: float | None = None) -> Reply:
        """Answer a request. `received`: when its body had arrived, by `time.perf_counter`; default: now.

        Raises RequestRefused; other errors have ended the session.
        """
        received = time.perf_counter() if received is None else received
        self.counts.overridden += bool(ask.overridden)
        self.counts.ignored.update(ask.overridden)
        if ask.prompt is not None:
            return await self._completion(ask, ask.prompt, received)
        messages, begun = without_prefill(ask)
        self._count_turn()
        self.counts.constrained += ask.form is not None
        tools = hashable(ask.tools)
        main = self._is_main(ask)
        request = self.chains.open(messages, tools, main=main)
        try:
            try:
                token_ids, kept = await self._tokens(request, ask)
            except CannotAppend:
                self.counts.tokenized_again += 1
                request.abandon()
                request = self.chains.open(messages, tools, main=main, from_scratch=True)
                token_ids, kept = await self._tokens(request, ask)
            if begun:
                token_ids = [*token_ids, *await self._policy.encode(begun)]
            answer, engine_s = await self._answer(request, token_ids, ask)
            said = await self._policy.read(answer.token_ids, ask.tools, ask.stop)
            if answer.token_ids:
                message = said.as_message()
                request.commit(token_ids, kept, answer, {**message, "content": begun + message["content"]})
        finally:
            request.abandon()
        name = secrets.token_hex(12)
        self._answered(time.perf_counter() - received - engine_s, name, request, len(token_ids), answer)
        return reply_of(name, said, answer, len(token_ids))

    def _is_main(self, ask: Ask) -> bool | None:
        """Return whether a request belongs to the main conversation; None if its messages tell."""
        if ask.main is not None:
            return ask.main
        named = self._limits.main_model
        if named is not None:
            return ask.model == named
        if self._first_model is None:
            self._first_model = ask.model
        return None if ask.model == self._first_model else False

    async def count_tokens(self, ask: Ask) -> int:
        """Return how many tokens a request has. It is no turn, and changes nothing. Raises RequestRefused."""
        messages, begun = without_prefill(ask)
        count = len(await self._policy.begin(messages, ask.tools))
        return count + len(await self._policy.encode(begun))

    async def _completion(self, ask: Ask, prompt: str | list[int], received: float) -> Reply:
        """Continue a text or tokens. Raises as `turn`."""
        token_ids = prompt if isinstance(prompt, list) else await self._tokens_of_text(prompt)
        name = secrets.token_hex(12)
        main = self._is_main(ask)
        answer = await self._continue(token_ids, ask.max_tokens, ask.stop, received, name, main)
        said = await self._policy.read(answer.token_ids, (), ask.stop)
        if isinstance(prompt, str):
            self._texts.note(prompt, said, [*token_ids, *answer.token_ids])
        return reply_of(name, said, answer, len(token_ids))

    async def _tokens_of_text(self, prompt: str) -> list[int]:
        """Return the tokens of a text, of which the policy may have written a part."""
        known, token_ids = self._texts.known(prompt)
        return [*token_ids, *await self._policy.encode(prompt[known:])]

    async def turn_of_tokens(
        self,
        token_ids: list[int],
        max_tokens: int | None,
        stop: tuple[str, ...] = (),
        received: float | None = None,
        main: bool | None = None,
    ) -> TokenReply:
        """Answer a request that sends tokens, as `turn`. Raises as `turn`."""
        received = time.perf_counter() if received is None else received
        name = secrets.token_hex(12)
        answer = await self._continue(token_ids, max_tokens, stop, received, name, main)
        versions = [
            max((start, version) for version, start in answer.spans if start <= at)[1]
            for at in range(len(answer.token_ids))
        ]
        log_probs = None if answer.log_probs is None else list(answer.log_probs)
        finish: Literal["stop", "length"] = "stop" if answer.whole else "length"
        return TokenReply(list(answer.token_ids), log_probs, versions, finish, name)

    async def _continue(
        self,
        token_ids: list[int],
        max_tokens: int | None,
        stop: tuple[str, ...],
        received: float,
        name: str,
        main: bool | None,
    ) -> Completion:
        """Return the answer to tokens. Raises as `turn`."""
        if not token_ids:
            raise RequestRefused("the prompt must have at least one token, got none")
        self._count_turn()
        request = self.chains.open_tokens(token_ids, main=main)
        try:
            known, new = self._policy.vocabulary, token_ids[len(request.known) :]
            for one in (min(new), max(new)) if new else ():
                if not 0 <= one < known:
                    raise RequestRefused(f"tokens must be between 0 and {known - 1}, got {one}")
            answer, engine_s = await self._answer(request, token_ids, Ask([], [], max_tokens, stop))
            if answer.token_ids:
                request.commit(token_ids, len(request.known), answer, None)
        finally:
            request.abandon()
        self._answered(time.perf_counter() - received - engine_s, name, request, len(token_ids), answer)
        return answer

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
            task = self._context.run(asyncio.ensure_future, self._noting_limits(begin))
            self._open[digest] = task
            self._tasks.add(task)
            task.add_done_callback(lambda done: self._settle(digest, done))
        else:
            self.counts.coalesced += 1
        self._waiting[task] += 1
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            # The session has ended meanwhile, or the caller has.
            self.check_open()
            task.add_done_callback(self._without_waiter)
            raise
        finally:
            self._waiting[task] -= 1
            if not self._waiting[task]:
                del self._waiting[task]

    def _without_waiter(self, task: asyncio.Future[Any]) -> None:
        """Note that the answer of a request is lost, unless it failed or another caller waits for it."""
        if not self._waiting[task] and not task.cancelled() and task.exception() is None:
            self.deliveries.note(task.result(), received=False)

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
        """Return what is to be trained, the row that is scored last: the one of the main conversation with
        the last answer that a client has received.
        """
        limits, lost = self._limits, self.deliveries.lost()
        return self.chains.rows(limits.prompt_tokens, lost, auxiliary=limits.auxiliary)

    async def _noting_limits(self, begin: Callable[[], Awaitable[Any]]) -> Any:
        before = self._limits_hit
        try:
            answer = await begin()
            # A request that was in flight at the refusal does not show that the agent copes with it.
            if self._limits_hit == before:
                self.limit_hit = ""
            return answer
        except RequestRefused as error:
            self.limit_hit = error.end or self.limit_hit
            self._limits_hit += bool(error.end)
            raise
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

    def _answered(
        self, took_s: float, name: str, request: OpenRequest, start: int, answer: Completion
    ) -> None:
        self.counts.turns += 1
        self.deliveries.places[name] = AnswerPlace(request.chain.request_id, start)
        self.turn_rewards.answered(name, start, start + len(answer.token_ids))
        self.took_ms.append(round(1e3 * took_s, 3))

    async def _tokens(self, request: OpenRequest, ask: Ask) -> tuple[list[int], int]:
        if not request.known:
            return await self._policy.begin(request.new, ask.tools), 0
        return await self._policy.append(request.previous, request.new, request.known, ask.tools)

    async def _answer(
        self, request: OpenRequest, token_ids: Sequence[int], ask: Ask
    ) -> tuple[Completion, float]:
        """Return the engine's answer and the seconds that it took."""
        if ask.max_tokens is not None and ask.max_tokens < 1:
            raise RequestRefused(f"max_tokens must be >= 1, got {ask.max_tokens}")
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
        limit = room if ask.max_tokens is None else min(room, ask.max_tokens)
        asked, name = time.perf_counter(), request.chain.request_id
        try:
            pictures = pictures_of([*request.previous, *request.new])
            answer = await self._policy.generate(name, token_ids, limit, ask.stop, ask.form, pictures)
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
    framed = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    return hashlib.blake2b(framed, digest_size=16).digest()
