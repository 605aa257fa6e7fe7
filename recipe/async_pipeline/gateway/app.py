# SPDX-License-Identifier: Apache-2.0
"""The gateway's HTTP routes: keys, bodies and streams are handled here, once for all dialects.

    POST /v1/chat/completions, /v1/completions,
         /v1/messages, /v1/responses                          model key     a turn
    POST /v1/messages/count_tokens, /v1/responses/input_tokens
                                                              model key     no turn: its number of tokens
    POST /v1/generate                                         model key     a turn, as tokens
    GET  /v1/models                                           model key     one model, `policy`
    POST /v1/session/reward  {"reward": number, "turn": n}    control key   the last one of a turn counts
    POST /v1/session/end     {"reason": text}                 control key   idempotent
    GET  /v1/session                                          control key   what happened so far
    POST /v1/tasks/claim         {"wait_s": number}           run key       a task with its lease, or 204
    POST /v1/tasks/renew                                      lease         before it expires
    POST /v1/tasks/finish        {"reward": number or null}   lease         the end
    POST /v1/tasks/fail          {"why": text}                lease         it cannot be played

Errors but 429 have `x-should-retry: false`, because the same request would fail again. An update of the
weights, or a replica that dies, is no error: the request takes longer.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from ..core.waits.deadline import within
from ..errors import RequestRefused, WaitTimeout
from .claims import Claims
from .dialects import COUNTING, DIALECTS
from .registry import Sessions
from .sessions import UNAVAILABLE, Session, digest_of
from .task_routes import BUSY, TASKS, Handler, InFlight, TaskRoutes, key_of
from .turns import Reply, TokenReply
from .wire import CountingDialect, Dialect, Read, decoded, texts

D = TypeVar("D", bound=Dialect)
MODEL = "policy"
READ_S = 60.0
"""Seconds that a client may take to send a body."""
MAX_MARKS = 400_000
"""Commas and opening brackets of a conversation. Its values are read on the event loop, about 1 us each."""
NO_RETRY = {"x-should-retry": "false"}
RETRY_AFTER_S = 1
"""Of a 429, and of a 503, for clients that try it again: by then the session has ended, and says why."""
JSON = "application/json"
RETRY = "x-stainless-retry-count"
"""With it, OpenAI's and Anthropic's clients number their attempts at one request."""


CONVERSATION = "x-async-pipeline-conversation"
"""With it, agents say to which conversation a request belongs: main or auxiliary."""


class _Generate(msgspec.Struct):
    prompt_ids: list[int]
    max_tokens: int | None = None
    stop: str | list[str] | None = None


class _Reward(msgspec.Struct):
    reward: float
    turn: int | str | None = None


class _End(msgspec.Struct):
    reason: str = "ended"


class Gateway:
    """Serves the sessions of a process."""

    def __init__(
        self,
        sessions: Sessions,
        *,
        max_body_bytes: int = 32 << 20,
        keep_alive_s: float = 5.0,
        claims: Claims | None = None,
    ) -> None:
        """`keep_alive_s`: seconds between the events that keep a stream open while an answer is written;
        `claims`: the tasks of external runners, if there may be any.
        """
        self._sessions = sessions
        self._max_body_bytes, self._keep_alive_s = max_body_bytes, keep_alive_s
        tasks: list[tuple[str, Handler]] = []
        if claims is not None:
            of_tasks = TaskRoutes(claims, self._body)
            tasks = [(name, getattr(of_tasks, name)) for name in ("claim", "renew", "finish", "fail")]
        self.app = Starlette(
            routes=[
                *(Route(one.path, self._speaking(one, self._turn), methods=["POST"]) for one in DIALECTS),
                *(
                    Route(one.count_path, self._speaking(one, self._count), methods=["POST"])
                    for one in COUNTING
                ),
                Route("/v1/generate", self._handled(self._generate), methods=["POST"]),
                Route("/v1/models", self._handled(self._models), methods=["GET"]),
                Route("/v1/models/{name:path}", self._handled(self._model), methods=["GET"]),
                Route("/v1/session", self._handled(self._session), methods=["GET"]),
                Route("/v1/session/reward", self._handled(self._reward), methods=["POST"]),
                Route("/v1/session/end", self._handled(self._end), methods=["POST"]),
                *(Route(TASKS + name, self._handled(one), methods=["POST"]) for name, one in tasks),
            ],
            middleware=[Middleware(InFlight)],
        )

    def _speaking(
        self, dialect: D, answer: Callable[[D, Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            try:
                return await answer(dialect, request)
            except RequestRefused as error:
                _forget_frames(error)
                body = dialect.error(error.status, str(error))
                return Response(body, error.status, _headers(error), JSON)

        return handle

    def _handled(self, handle: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def handle_or_refuse(request: Request) -> Response:
            try:
                found = await handle(request)
                if found is None:
                    return Response(status_code=204)
                return Response(msgspec.json.encode(found), 200, media_type=JSON)
            except RequestRefused as error:
                _forget_frames(error)
                body = {"error": {"message": str(error), "type": "invalid_request_error"}}
                return Response(msgspec.json.encode(body), error.status, _headers(error), JSON)

        return handle_or_refuse

    async def _count(self, dialect: CountingDialect, request: Request) -> Response:
        session = self._session_of(request, controls=False)
        body = await self._conversation(request)
        session.check_open()
        count = await session.count_tokens(dialect.read_input(body).ask)
        # Clients ignore the field of the other API.
        found = {"object": "response.input_tokens", "input_tokens": count}
        return Response(msgspec.json.encode(found), 200, media_type=JSON)

    async def _turn(self, dialect: Dialect, request: Request) -> Response:
        session = self._session_of(request, controls=False)
        body = await self._conversation(request)
        session.check_open()
        received = time.perf_counter()
        read = dialect.read(body)
        digest = digest_of(dialect.path.encode(), body)
        ask = read.ask._replace(model=read.model, main=_is_main(request))
        answering = session.once(digest, lambda: session.turn(ask, received), again=_is_retry(request))
        if not read.stream:
            reply = await answering
            session.deliveries.note(reply, received=not await request.is_disconnected())
            return Response(dialect.answer(read, reply), 200, media_type=JSON)

        # The status is sent before the answer is known, so wait for errors that are known at once.
        task: asyncio.Future[Reply] = asyncio.ensure_future(answering)
        await asyncio.wait({task}, timeout=self._keep_alive_s)
        if task.done():
            task.result()
        headers = {"cache-control": "no-store"}
        return StreamingResponse(
            self._events(dialect, read, task, session, request), 200, headers, media_type="text/event-stream"
        )

    async def _events(
        self, dialect: Dialect, read: Read, task: asyncio.Future[Reply], session: Session, request: Request
    ) -> AsyncIterator[bytes]:
        reply: Reply | None = None
        sent = False
        try:
            while not task.done():
                yield dialect.keep_alive
                await asyncio.wait({task}, timeout=self._keep_alive_s)
            try:
                reply = task.result()
            except RequestRefused as error:
                _forget_frames(error)
                yield dialect.error_event(error.status, str(error))
                return
            yield b"".join(dialect.events(read, reply))
            sent = not await request.is_disconnected()
        finally:
            if reply is not None:
                session.deliveries.note(reply, received=sent)
            # The generation continues: the client may try again.
            task.cancel()

    async def _generate(self, request: Request) -> Any:
        session = self._session_of(request, controls=False)
        body = await self._body(request)
        session.check_open()
        received = time.perf_counter()
        found = decoded(body, _Generate)

        def begin() -> Awaitable[TokenReply]:
            return session.turn_of_tokens(
                found.prompt_ids, found.max_tokens, texts(found.stop), received, _is_main(request)
            )

        digest = digest_of(b"/v1/generate", body)
        reply: TokenReply = await session.once(digest, begin, again=_is_retry(request))
        session.deliveries.note(reply, received=not await request.is_disconnected())
        # Copies of the client in use know the fields of their version only.
        return {name: value for name, value in reply._asdict().items() if name != "id"}

    async def _models(self, request: Request) -> Any:
        self._session_of(request, controls=False)
        return {"object": "list", "data": [_MODEL], "has_more": False, "first_id": MODEL, "last_id": MODEL}

    async def _model(self, request: Request) -> Any:
        self._session_of(request, controls=False)
        return _MODEL

    async def _session(self, request: Request) -> Any:
        session = self._session_of(request, controls=True)
        rows = session.rows()
        counts = session.counts
        return {
            "turns": counts.turns,
            "chains": len(rows),
            "tokens": sum(sum(row.mask) for row in rows),
            "versions": sorted({version for row in rows for version, _ in row.spans}),
            "coalesced": counts.coalesced,
            "overridden": counts.overridden,
            "ignored": dict(counts.ignored),
            "reward": session.reward,
            "turn_rewards": {str(turn): one for turn, one in sorted(session.turn_rewards.rewards.items())},
            "ended": session.ended,
            "seconds_left": session.seconds_left(),
        }

    async def _reward(self, request: Request) -> Any:
        session = self._session_of(request, controls=True)
        body = await self._body(request)
        try:
            found = decoded(body, _Reward)
        except RequestRefused as error:
            raise RequestRefused(str(error), status=422) from error
        if not math.isfinite(found.reward):
            raise RequestRefused(f"reward must be a finite number, got {found.reward}", status=422)
        if found.turn is None:
            session.reward = found.reward
        else:
            session.turn_rewards.give(found.turn, found.reward)
        return {}

    async def _end(self, request: Request) -> Any:
        session = self._session_of(request, controls=True)
        body = await self._body(request)
        session.end(decoded(body or b"{}", _End).reason)
        return {}

    def _session_of(self, request: Request, *, controls: bool) -> Session:
        return self._sessions.of(key_of(request), controls=controls)

    async def _conversation(self, request: Request) -> bytes:
        body = await self._body(request)
        marks = sum(map(body.count, (b",", b"{", b"[")))
        if marks > MAX_MARKS:
            raise RequestRefused(
                f"the body has {marks} commas and opening brackets, at most {MAX_MARKS} are read", status=413
            )
        return body

    async def _body(self, request: Request) -> bytes:
        parts, size = [], 0

        async def read() -> None:
            nonlocal size
            async for part in request.stream():
                size += len(part)
                if size > self._max_body_bytes:
                    raise RequestRefused(f"the body exceeds {self._max_body_bytes} bytes", status=413)
                parts.append(part)

        try:
            await within(read(), READ_S, owner="the gateway", what="a body to arrive")
        except WaitTimeout as error:
            raise RequestRefused(f"the body took more than {READ_S:g} s to arrive", status=408) from error
        except ClientDisconnect as error:
            raise RequestRefused("the client disconnected", status=400) from error
        return b"".join(parts)


_MODEL = {
    "id": MODEL,
    "object": "model",
    "type": "model",
    "created": 0,
    "owned_by": "async_pipeline",
    "display_name": MODEL,
    "created_at": "1970-01-01T00:00:00Z",
}


def _is_main(request: Request) -> bool | None:
    """Return whether a request says that it belongs to the main conversation. Raises RequestRefused."""
    said = request.headers.get(CONVERSATION)
    if said not in (None, "main", "auxiliary"):
        raise RequestRefused(f"{CONVERSATION} must be main or auxiliary, got {said!r}")
    return None if said is None else said == "main"


def _forget_frames(error: RequestRefused) -> None:
    """Release a request that was refused: the frames of the traceback have its body and its task, which has
    the error, so all of them would wait for the garbage collector.
    """
    error.__traceback__ = None


def _headers(error: RequestRefused) -> dict[str, str]:
    later = {"retry-after": str(RETRY_AFTER_S)}
    return later if error.status == BUSY else NO_RETRY | later if error.status == UNAVAILABLE else NO_RETRY


def _is_retry(request: Request) -> bool:
    count = request.headers.get(RETRY, "0")
    return count.isdecimal() and int(count) > 0
