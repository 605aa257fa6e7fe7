# SPDX-License-Identifier: Apache-2.0
"""Generation across weight updates: record which version wrote which token of a response.

A response is a run of spans, one for each version that wrote a part of it. The engine counts: at a load
it reports how many tokens each request has, so a span begins at exactly the right token, however late the
tokens themselves arrive here.

Requests in flight at a load, by policy:

- `keep`: they continue with the new weights and the old keys and values;
- `abort`: they stop and restart from their tokens, which the new weights process from the beginning; a
  request with a seed continues with another one, which follows from its seed and the number of its tokens;
- `drain`: the load waits for them, and new requests wait for the load.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from ..core.deadline import within
from ..core.items import LoadReport

STANDSTILL_S = 5.0
"""Deadline for pausing an engine after a failed load."""
_PAUSE = {"abort": "abort", "drain": "wait"}
"""vLLM's names of the pause modes; `keep` needs no pause."""


class Span(NamedTuple):
    """Tokens of a response from `start` until the next span were written by `version`."""

    version: int
    start: int


class Loaded(NamedTuple):
    """The engine's reply to a load."""

    reports: Sequence[LoadReport]
    """One for each rank of the engine."""
    progress: Mapping[str, int]
    """Output tokens of each live request at the load, by the engine's internal id."""


class LoadMode(NamedTuple):
    """The settings of a load, named after their configuration keys."""

    in_flight: str = "keep"
    stage: str = "host"
    reuse_prefixes: bool = False


Load = Callable[[], Awaitable[Loaded]]


class Engine(Protocol):
    """The part of vLLM's `AsyncLLM` that is used here."""

    output_processor: Any
    generate: Callable[..., AsyncGenerator[Any, None]]
    add_request: Callable[..., Awaitable[Any]]

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None: ...

    async def resume_generation(self) -> None: ...


@dataclass
class _Answer:
    """One request that the engine has, or is about to get."""

    prompt_tokens: int
    spans: list[Span] = field(default_factory=list)
    before: list[Any] = field(default_factory=list)
    """Completions of the attempts that loads have stopped."""
    part: Any = None
    """The completion of this attempt, as far as it was seen."""
    sent_before: int | None = None
    """Number of the next load at the time when the engine got the request."""
    interrupted: bool = False
    """A load has stopped it in the engine."""
    stopped_by_load: bool = False

    @property
    def said(self) -> list[int]:
        """Return the tokens of the previous attempts."""
        return [token for part in self.before for token in part.token_ids]

    @property
    def base(self) -> int:
        return sum(len(part.token_ids) for part in self.before)

    @property
    def total(self) -> int:
        return self.base + (len(self.part.token_ids) if self.part is not None else 0)

    def begin(self, version: int, start: int) -> None:
        """Begin the span of `version` at token `start`; drop spans that have no token by then."""
        self.spans = [*(span for span in self.spans if span.start < start), Span(version, start)]

    def begin_attempt(self, version: int | None) -> None:
        self.part, self.sent_before, self.interrupted, self.stopped_by_load = None, None, False, False
        if version is not None:
            self.begin(version, self.base)

    def take(self, output: Any) -> bool:
        """Record an output; return False if it only reports that a load has stopped the request."""
        if output.outputs:
            self.part = output.outputs[0]
        reason = self.part.finish_reason if self.part is not None else "abort"
        self.stopped_by_load = self.interrupted and output.finished and reason == "abort"
        return not self.stopped_by_load

    def written(self, state: Any) -> tuple[list[int], list[float] | None]:
        """Return the tokens of all attempts so far, and their log-probs.

        `state` is the engine's own state of this attempt, or None.
        """
        parts = [(list(part.token_ids), part.logprobs) for part in self.before]
        if state is not None:
            parts.append((list(state.detokenizer.output_token_ids), state.logprobs_processor.logprobs))
        tokens = [token for ids, _ in parts for token in ids]
        if any(found is None or len(found) < len(ids) for ids, found in parts):
            return tokens, None
        return tokens, [found[i][token].logprob for ids, found in parts for i, token in enumerate(ids)]

    def written_spans(self) -> list[Span]:
        """Return the spans that have tokens; for an empty response, the first one."""
        return [span for span in self.spans if span.start < self.total] or self.spans[:1]


_recording: ContextVar[list[Span] | None] = ContextVar(
    "spans of the answer that this task waits for", default=None
)


@contextmanager
def recorded_spans() -> Iterator[list[Span]]:
    """Yield a list that receives the spans of the one response generated inside."""
    spans: list[Span] = []
    token = _recording.set(spans)
    try:
        yield spans
    finally:
        _recording.reset(token)


class VersionedEngine:
    """Replaces `generate` and `add_request` of an engine object."""

    def __init__(self, engine: Engine) -> None:
        self.version: int | None = None
        """The served version; None before the first load."""
        self._engine = engine
        self._generate, self._add_request = engine.generate, engine.add_request
        self._answers: dict[str, _Answer] = {}
        self._next_load = 0
        self._settled = asyncio.Event()
        """Set while no load is in progress."""
        self._settled.set()
        self._unknown = False
        """A load has begun and has not succeeded yet, so it is unknown which weights fill the cache."""
        self._paused = False
        self._salting = True
        self._follow = True
        """Receive outputs token by token, so that a response stopped by a load is counted as far as it
        was seen.
        """
        engine.generate = self.generate
        engine.add_request = self._add

    async def load(
        self, version: int, load: Load, in_flight: str, *, reuse_prefixes: bool = False
    ) -> tuple[Loaded, int]:
        """Run `load` when the requests in flight allow it; return its result and the tokens to be read
        again.

        Raises whatever `load` raises. It is then unknown which weights the engine has, so the engine
        stays paused with all its requests until a later load succeeds.
        """
        self._settled.clear()
        self._unknown, self._follow, self._salting = True, in_flight == "abort", not reuse_prefixes
        if in_flight == "abort":
            for answer in self._answers.values():
                answer.interrupted = True
        try:
            if in_flight in _PAUSE:
                await self._pause(_PAUSE[in_flight])
            again = sum(a.prompt_tokens + a.total for a in self._answers.values() if a.interrupted)
            number, self._next_load = self._next_load, self._next_load + 1
            try:
                loaded = await load()
            except BaseException:
                # A dead or stuck engine cannot be paused; the caller gets the original error.
                with suppress(Exception):
                    await within(
                        self._pause("keep"),
                        STANDSTILL_S,
                        owner="a failed load",
                        what="the engine to pause",
                    )
                raise
        finally:
            self._settled.set()
        # vLLM appends random characters to the ids that it is given.
        progress = {internal.rpartition("-")[0]: tokens for internal, tokens in loaded.progress.items()}
        for request, answer in self._answers.items():
            # A request that arrived after the load has no older tokens. Otherwise an unnamed one was
            # finished.
            if request in progress or answer.sent_before is None or answer.sent_before > number:
                answer.interrupted = False
                answer.begin(version, answer.base + progress.get(request, 0))
        self.version, self._unknown = version, False
        if self._paused:
            await self._engine.resume_generation()
            self._paused = False
        return loaded, again

    async def _pause(self, mode: str) -> None:
        self._paused = True
        await self._engine.pause_generation(mode=mode, clear_cache=False)

    async def _add(self, request_id: str, *args: Any, **kwargs: Any) -> Any:
        queue = await self._add_request(request_id, *args, **kwargs)
        if request_id in self._answers:
            self._answers[request_id].sent_before = self._next_load
        return queue

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        """Generate as the engine does, across loads.

        Within `recorded_spans`, a response that a load interrupts continues by itself; only its last
        output, with its tokens but without its text, is guaranteed to arrive.
        """
        record = _recording.get()
        if record is None:
            async for output in self._generate(self._salted(prompt), sampling_params, request_id, **kwargs):
                yield output
            return
        answer = _Answer(prompt_tokens=len(prompt["prompt_token_ids"]))
        self._answers[request_id] = answer
        try:
            while True:
                answer.begin_attempt(self.version)
                attempt = self._generate(
                    self._salted(_extended(prompt, answer.said)),
                    self._cheaper(_shortened(sampling_params, answer.base)),
                    request_id,
                    **kwargs,
                )
                async for output in attempt:
                    if answer.take(output):
                        yield _joined(output, answer.before)
                if not answer.stopped_by_load:
                    # A load may have changed the version that wrote its end; only the load knows.
                    await self._settled.wait()
                    return
                if answer.part is not None:
                    answer.before.append(answer.part)
        finally:
            del self._answers[request_id]
            record[:] = answer.written_spans()

    async def written(
        self, request_ids: Sequence[str]
    ) -> dict[str, tuple[list[int], list[float] | None, list[list[int]]]]:
        """Return tokens, log-probs and spans of unfinished responses; omit those without a token and
        unknown ids.

        Waits for: a load in progress, since only it knows where its span begins. Unblocked by: its end.
        """
        await self._settled.wait()
        # The engine appends random characters to the ids that it is given.
        states = {
            name.rpartition("-")[0]: state
            for name, state in self._engine.output_processor.request_states.items()
        }
        found = {}
        for request in request_ids:
            answer = self._answers.get(request)
            if answer is not None and not self._unknown:
                tokens, log_probs = answer.written(states.get(request))
                spans = [list(span) for span in answer.spans if span.start < len(tokens)]
                if tokens and spans:
                    found[request] = tokens, log_probs, spans
        return found

    def _cheaper(self, params: Any) -> Any:
        """Leave out outputs before the last one and text, which have no reader and cost time for each
        token.
        """
        params = copy.copy(params)
        if not self._follow:
            params.output_kind = type(params.output_kind).FINAL_ONLY
        if not params.stop:
            params.detokenize = False
        return params

    def _salted(self, prompt: Any) -> Any:
        """Mark the prompt so that a version does not reuse keys and values of another one, unless
        allowed.
        """
        if not self._salting or not isinstance(prompt, dict):
            return prompt
        return {**prompt, "cache_salt": uuid.uuid4().hex if self._unknown else f"v{self.version}"}


def _extended(prompt: dict[str, Any], said: Sequence[int]) -> dict[str, Any]:
    return {**prompt, "prompt_token_ids": [*prompt["prompt_token_ids"], *said]} if said else prompt


def _shortened(params: Any, said: int) -> Any:
    """Return the sampling parameters for the rest of a response."""
    if not said:
        return params
    left = copy.copy(params)
    left.max_tokens = params.max_tokens - said
    left.min_tokens = max(0, params.min_tokens - said)
    if params.seed is not None:
        # With the same seed, the rest would be sampled with the random numbers of the first tokens.
        left.seed = _derived_seed(params.seed, said)
    return left


def _derived_seed(seed: int, position: int) -> int:
    """Return a seed of 32 bits for the tokens from `position` on."""
    digest = hashlib.blake2b(f"{seed} {position}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def _joined(output: Any, before: Sequence[Any]) -> Any:
    """Return the engine's output with the previous attempts in front."""
    if before and output.outputs:
        part = copy.copy(output.outputs[0])
        said = sum(len(one.token_ids) for one in before)
        part.token_ids = [*(token for one in before for token in one.token_ids), *part.token_ids]
        if part.logprobs is not None:
            part.logprobs = [*(entry for one in before for entry in one.logprobs), *part.logprobs]
        if part.cumulative_logprob is not None:
            part.cumulative_logprob += sum(one.cumulative_logprob for one in before)
        part.text = "".join([*(one.text for one in before), part.text])
        output.outputs = [part]
        output.prompt_token_ids = output.prompt_token_ids[: len(output.prompt_token_ids) - said]
    return output
