# SPDX-License-Identifier: Apache-2.0
"""Generation across weight updates: record which version wrote which token of a response.

A response is a run of spans, one for each version that wrote a part of it. The engine counts: at a load
it reports how many tokens each request has, so a span begins at exactly the right token, however late the
tokens themselves arrive here.

Requests in flight at a load, by policy:

- `keep`: they continue with the new weights and the old keys and values;
- `abort`: they stop and restart from their tokens, which the new weights process from the beginning; a
  request with a seed continues with another one, which follows from its seed and the number of its tokens,
  and one whose response must have a form begins again, without its tokens;
- `drain`: the load waits for them, and new requests wait for the load.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from contextvars import ContextVar
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar
from uuid import uuid4

from ...core.groups.items import LoadReport, TokenSpan, pairs_of
from ...core.waits.deadline import within
from .response import AttemptGate, Part, ResponseRecord

FORM = "structured_outputs"
"""The sampling parameter that has the form of a response, `{"json": SCHEMA}` or `{"structural_tag": TAG}`."""
STANDSTILL_S = 5.0
"""Deadline for pausing an engine after a failed load."""
Request = TypeVar("Request")
"""A request as an engine's own `generate` takes it."""
Output = TypeVar("Output")
"""What an engine's own `generate` returns."""
_Request = TypeVar("_Request", contravariant=True)
Reuse = Literal[False, True, "session"]
"""Which requests may use keys and values of earlier versions: none, all, or a session its own ones."""


class Loaded(NamedTuple):
    """The engine's reply to a load."""

    reports: Sequence[LoadReport]
    """One for each rank of the engine."""
    progress: Mapping[str, int]
    """Output tokens of each live request at the load, by `Engine.name`. With tokens that the step before the
    load has sampled, also if they are not sent yet.
    """


class LoadMode(NamedTuple):
    """The settings of a load, named after their configuration keys."""

    in_flight: str = "keep"
    stage: str = "host"
    reuse_prefixes: Reuse = False


class Salts(NamedTuple):
    """The salts of the requests that begin before and after a load."""

    replaced: str
    new: str

    def renewed(self, salt: str | None) -> str | None:
        """Return the salt of a request that has waited in the engine during the load, without a step.

        It uses prefixes of the new version, which writes all of it. The salt of an earlier version is kept:
        it is a session's.
        """
        is_of_session = salt is not None and salt.startswith("v") and salt != self.replaced
        return salt if salt is None or is_of_session else self.new


LoadCall = Callable[[], Awaitable[Loaded]]


class AttemptOptions(NamedTuple):
    """How a request goes to the engine."""

    written: Sequence[int] = ()
    """Tokens of previous attempts, which follow the prompt and count as generated."""
    salt: str | None = None
    """Requests with different salts share no keys and values."""
    every_token: bool = True
    """Whether outputs before the last one have a reader."""
    text: bool = True
    """Whether the text has a reader."""
    sent: Callable[[], None] = lambda: None
    """Called when the engine has got the request: a load that is sent later finds it there."""
    priority: int | None = None
    """Requests with a smaller one go first in an engine that schedules by priority."""


class AttemptTokens(NamedTuple):
    """What an attempt has generated so far."""

    token_ids: Sequence[int]
    log_probs: Sequence[float] | None


class Engine(Protocol[_Request, Output]):
    """What an engine does, in its server's process. A name is the id that the caller gave to a request."""

    @property
    def rejections(self) -> tuple[type[Exception], ...]:
        """Return the errors of an attempt that the engine refuses because it is paused."""

    def name(self, request: _Request) -> str: ...

    def prompt_tokens(self, request: _Request) -> int: ...

    def has_form(self, request: _Request) -> bool:
        """Return whether the engine keeps the response to a grammar, which begins with its first token."""

    def attempt(self, request: _Request, how: AttemptOptions) -> AsyncGenerator[Output, None]:
        """Generate the rest of a response. Ending the generator early abandons the request.

        It begins only while the engine is not paused, but a pause can overtake it.
        """

    def part(self, output: Output) -> Part | None:
        """Return what the attempt has generated up to this output, or None if the output does not say."""

    def log_probs(self, part: Part) -> Sequence[float] | None:
        """Return the log-prob of each token, or None if they were not requested."""

    def finished(self, output: Output) -> bool: ...

    def joined(self, output: Output, before: Sequence[Part]) -> Output:
        """Return the output of the last attempt with the previous ones in front."""

    async def written(self, names: Sequence[str]) -> Mapping[str, AttemptTokens]:
        """Return what the attempts of these requests have generated so far."""

    async def pause(self, mode: str) -> None:
        """Stop until `resume`. No attempt begins meanwhile, but some may be on their way.

        `abort`: end all attempts; `drain`: wait for their ends; `freeze`: stop the engine between two steps.
        """

    async def resume(self) -> None: ...


class _Recording(NamedTuple):
    spans: list[TokenSpan]
    session: int | None
    due: int | None


_recording: ContextVar[_Recording | None] = ContextVar("the response that this task waits for", default=None)


@contextmanager
def recorded_spans(session: int | None = None, due: int | None = None) -> Iterator[list[TokenSpan]]:
    """Yield a list that receives the spans of the one response generated inside.

    `session`: the version that began the first response of its session; None if this is the first one.
    `due`: grows with the step that trains the response; None if none does.
    """
    spans: list[TokenSpan] = []
    token = _recording.set(_Recording(spans, session, due))
    try:
        yield spans
    finally:
        _recording.reset(token)


class VersionedEngine(Generic[Request, Output]):
    """What versions mean to an engine: which one wrote a token, and what a load does to requests."""

    def __init__(self, engine: Engine[Request, Output]) -> None:
        self.version: int | None = None
        """The served version; None before the first load."""
        self._engine = engine
        self._responses: dict[str, ResponseRecord] = {}
        self._next_load = 0
        self._settled = asyncio.Event()
        """Set while no load is in progress."""
        self._settled.set()
        self._unknown = False
        """A load has begun and has not succeeded yet, so it is unknown which weights fill the cache."""
        self._gate = AttemptGate()
        """Closed while the engine is paused."""
        self._reuse: Reuse = False
        self._follow = True
        """Receive outputs token by token: a response that a load stops is counted as far as it was seen."""

    async def load(
        self, version: int, load: LoadCall, in_flight: str, *, reuse_prefixes: Reuse = False
    ) -> tuple[Loaded, int]:
        """Run `load` when the requests in flight allow it; return its result and the tokens to be read
        again.

        Raises whatever `load` raises. It is then unknown which weights the engine has, so the engine
        stays paused with all its requests until a later load succeeds.
        """
        self._settled.clear()
        self._unknown, self._follow, self._reuse = True, in_flight == "abort", reuse_prefixes
        stopped = {name: len(a.before) for name, a in self._responses.items()} if in_flight == "abort" else {}
        for name in stopped:
            self._responses[name].interrupted = True
        try:
            if in_flight != "keep":
                await self._pause(in_flight)
            again = sum(
                a.prompt_tokens + a.total
                for name, a in self._responses.items()
                if name in stopped and (a.interrupted or len(a.before) > stopped[name])
            )
            number, self._next_load = self._next_load, self._next_load + 1
            try:
                loaded = await load()
            except BaseException:
                # A dead or stuck engine cannot be paused; the caller gets the original error.
                with suppress(Exception):
                    await within(
                        self._pause("freeze"),
                        STANDSTILL_S,
                        owner="a failed load",
                        what="the engine to pause",
                    )
                raise
        finally:
            self._settled.set()
        for request, response in self._responses.items():
            # A request that arrived after the load has no older tokens. Otherwise an unnamed one was
            # finished.
            if request in loaded.progress or response.sent_before is None or response.sent_before > number:
                response.interrupted = False
                response.begin(version, response.base + loaded.progress.get(request, 0))
        self.version, self._unknown = version, False
        if not self._gate.is_open:
            await self._engine.resume()
            self._gate.open()
        return loaded, again

    async def _pause(self, mode: str) -> None:
        self._gate.close()
        await self._engine.pause(mode)

    def salts(self, version: int) -> Salts | None:
        """Return the salts before and after the load of a version; None if requests have no salts."""
        return None if self._reuse is True else Salts(salt_of(self.version), salt_of(version))

    def salt(self, session: int | None = None) -> str | None:
        """Return the salt of a request that begins now: a version does not reuse keys and values of another
        one, unless allowed.

        The requests of a session keep the salt of the first one, if they may. Sessions of the same prompt
        that began with the same version still share its prefix. `session`: see `recorded_spans`.
        """
        if self._reuse is True:
            return None
        if self._reuse == "session" and session is not None:
            return salt_of(session)
        return uuid4().hex if self._unknown else salt_of(self.version)

    async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        """Generate as the engine does, across loads.

        Within `recorded_spans`, a response that a load interrupts continues by itself; only its last
        output, with its tokens but without its text, is guaranteed to arrive.
        """
        record, arrival = _recording.get(), self._gate.arrive()
        if record is None:
            passed = self._outputs(request, arrival, lambda: AttemptOptions(salt=self.salt()))
            async with aclosing(passed) as outputs:
                async for output in outputs:
                    yield output
            return
        name, session = self._engine.name(request), record.session
        response = self._responses[name] = ResponseRecord(prompt_tokens=self._engine.prompt_tokens(request))

        def sent() -> None:
            response.sent_before = self._next_load

        def begin() -> AttemptOptions:
            response.begin_attempt(self.version)
            salt = self.salt(session)
            return AttemptOptions(response.said, salt, self._follow, False, sent, record.due)

        try:
            while True:
                async with aclosing(self._outputs(request, arrival, begin)) as outputs:
                    async for output in outputs:
                        if response.take(self._engine.part(output), self._engine.finished(output)):
                            yield self._engine.joined(output, response.before)
                if not response.stopped_by_load:
                    # A load may have changed the version that wrote its end; only the load knows.
                    await self._settled.wait()
                    return
                response.end_attempt(kept=not self._engine.has_form(request))
        finally:
            del self._responses[name]
            record.spans[:] = response.written_spans()

    async def _outputs(
        self, request: Request, arrival: int, begin: Callable[[], AttemptOptions]
    ) -> AsyncGenerator[Output, None]:
        """Yield the outputs of one attempt, which `begin` describes when it begins.

        An engine that is paused may reject it. Then it has not begun, and begins again after the pause.
        """
        while True:
            closings = await self._gate.passed(arrival)
            try:
                async with aclosing(self._engine.attempt(request, begin())) as outputs:
                    async for output in outputs:
                        yield output
                return
            except self._engine.rejections:
                if closings == self._gate.closings:
                    raise  # Another caller has paused the engine.

    async def written(
        self, request_ids: Sequence[str]
    ) -> dict[str, tuple[list[int], list[float] | None, list[list[int]]]]:
        """Return tokens, log-probs and spans of unfinished responses; omit those without a token and
        unknown ids.

        Waits for: a load in progress, since only it knows where its span begins. Unblocked by: its end.
        """
        await self._settled.wait()
        asked = {name: self._responses[name] for name in request_ids if name in self._responses}
        attempts = {name: len(response.before) for name, response in asked.items()}
        now = await self._engine.written(list(asked))
        found = {}
        for name, response in asked.items():
            if self._unknown or self._responses.get(name) is not response:
                continue
            # An attempt that has ended meanwhile is in front already.
            current = now.get(name) if len(response.before) == attempts[name] else None
            parts = [AttemptTokens(part.token_ids, self._engine.log_probs(part)) for part in response.before]
            tokens, log_probs = _together([*parts, *([current] if current is not None else [])])
            spans = pairs_of(span for span in response.spans if span.start < len(tokens))
            if tokens and spans:
                found[name] = tokens, log_probs, spans
        return found


def salt_of(version: int | None) -> str:
    """Return the salt of the requests that begin with a version."""
    return f"v{version}"


def _together(parts: Sequence[AttemptTokens]) -> tuple[list[int], list[float] | None]:
    tokens = [token for part in parts for token in part.token_ids]
    if any(part.log_probs is None or len(part.log_probs) < len(part.token_ids) for part in parts):
        return tokens, None
    return tokens, [one for part in parts for one in (part.log_probs or ())[: len(part.token_ids)]]


def derived_seed(seed: int, position: int) -> int:
    """Return a seed of 32 bits for the tokens from `position` on.

    With the seed of a request, the rest of its response would be sampled with the random numbers of the first
    tokens.
    """
    digest = hashlib.blake2b(f"{seed} {position}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")
