# SPDX-License-Identifier: Apache-2.0
"""vLLM's `AsyncLLM` in virtual time: each token is the version that wrote it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any

from recipe.async_pipeline.core.groups.items import LoadReport
from recipe.async_pipeline.verl_bridge.rollout.vllm.engine import progress_by_name, serve_versions
from recipe.async_pipeline.weight_sync.engine.versioned_engine import Loaded, VersionedEngine
from tests.fakes.timed_engine import LOG_PROB, PROMPT, STEP_S, Answer, Sent


@dataclass
class Completion:
    token_ids: list[int]
    finish_reason: str | None = None
    logprobs: list[dict[int, Any]] | None = None
    cumulative_logprob: float | None = None
    text: str = ""


class Kind(Enum):
    CUMULATIVE = 0
    FINAL_ONLY = 1


@dataclass
class Params:
    max_tokens: int
    min_tokens: int = 0
    seed: int | None = None
    output_kind: Kind = Kind.CUMULATIVE
    stop: list[str] = field(default_factory=list)
    detokenize: bool = True
    structured_outputs: Any = None


@dataclass
class Live:
    prompt: dict[str, Any]
    params: Params
    queue: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    tokens: list[int] = field(default_factory=list)
    arrived: list[int] = field(default_factory=list)
    """The spans that the caller can know of."""

    def arrive(self, tokens: list[int], output: Any, last: bool) -> None:
        self.arrived = [] if last else tokens
        if output is not None:
            self.queue.put_nowait(output)


def likely(tokens: list[int]) -> list[dict[int, Any]]:
    return [{token: SimpleNamespace(logprob=LOG_PROB)} for token in tokens]


class AsyncLLM:
    """Writes one token of every live request a step; what it writes arrives `late_s` later."""

    def __init__(self, late_s: float = 0.0, send_s: float = 0.0) -> None:
        self.weights = -1
        self.late_s, self.send_s = late_s, send_s
        self.live: dict[str, Live] = {}
        self.paused: str | None = None
        self.inbox: list[tuple[str, Live]] = []
        self.load_ahead = False
        self.numbers = iter(range(10**6))
        self.prompts: list[dict[str, Any]] = []
        self.priorities: list[int | None] = []
        self.params: list[Params] = []

    async def run(self) -> None:
        while True:
            await asyncio.sleep(STEP_S)
            for name, request in list(self.live.items()):
                if self.paused is None or (self.paused == "wait" and request.tokens):
                    request.tokens.append(self.weights)
                    self.say(
                        name, request, "length" if len(request.tokens) == request.params.max_tokens else None
                    )

    def say(self, name: str, request: Live, reason: str | None) -> None:
        tokens = list(request.tokens)
        completion = Completion(tokens, reason, likely(tokens), LOG_PROB * len(tokens), "x" * len(tokens))
        # As vLLM: a request that was stopped before its first token has no completion.
        outputs = [completion] if tokens else []
        output = SimpleNamespace(
            outputs=outputs,
            finished=reason is not None,
            prompt_token_ids=list(request.prompt["prompt_token_ids"]),
        )
        told = output if reason is not None or request.params.output_kind is Kind.CUMULATIVE else None
        asyncio.get_running_loop().call_later(self.late_s, request.arrive, tokens, told, reason is not None)
        if reason is not None:
            del self.live[name]

    @property
    def output_processor(self) -> Any:
        return SimpleNamespace(
            request_states={
                name: SimpleNamespace(
                    detokenizer=SimpleNamespace(output_token_ids=list(request.arrived)),
                    logprobs_processor=SimpleNamespace(logprobs=likely(request.arrived)),
                )
                for name, request in self.live.items()
            }
        )

    async def add_request(
        self, request_id: str, prompt: dict[str, Any], params: Params, priority: int | None = None
    ) -> Live:
        await asyncio.sleep(self.send_s)
        request = Live(prompt, params)
        self.prompts.append(prompt)
        self.params.append(params)
        self.priorities.append(priority)
        self.inbox.append((f"{request_id}-{next(self.numbers):08x}", request))
        self.read_inbox()
        return request

    def read_inbox(self) -> None:
        """One message after the other: what comes behind a load waits for it."""
        if not self.load_ahead:
            for name, request in self.inbox:
                self.receive(name, request)
            self.inbox.clear()

    def receive(self, name: str, request: Live) -> None:
        self.live[name] = request

    async def generate(
        self, prompt: dict[str, Any], params: Params, request_id: str, priority: int | None = None
    ) -> AsyncGenerator[Any, None]:
        request = await self.add_request(request_id, prompt, params, priority)
        finished = False
        while not finished:
            output = await request.queue.get()
            if isinstance(output, Exception):
                raise output
            finished = output.finished
            yield output

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        assert not clear_cache, "a version's own prefixes stay valid; others cannot be hit"
        self.paused = mode
        if mode == "abort":
            for name, request in list(self.live.items()):
                self.say(name, request, "abort")
        while mode == "wait" and any(r.tokens for r in self.live.values()):  # noqa: ASYNC110  virtual time
            await asyncio.sleep(STEP_S)

    async def resume_generation(self) -> None:
        self.paused = None

    def loading(self, version: int, seconds: float) -> Any:
        async def load() -> Loaded:
            self.load_ahead = True
            await asyncio.sleep(seconds / 2)
            self.weights = version
            progress = {name: len(request.tokens) for name, request in self.live.items()}
            self.load_ahead = False
            self.read_inbox()
            await asyncio.sleep(seconds / 2)
            return Loaded([LoadReport()], progress_by_name(progress))

        return load

    # The face of all fake engines.

    def serve_versions(self) -> VersionedEngine[Any, Any]:
        engine: Any = self  # its methods are methods; the protocol's are attributes that can be set
        return serve_versions(engine)

    async def ask(
        self, name: str, tokens: int, seed: int | None = None, form: dict[str, str] | None = None
    ) -> Answer:
        params = Params(tokens, min_tokens=2, seed=seed, structured_outputs=form)
        outputs = [o async for o in self.generate({"prompt_token_ids": PROMPT}, params, request_id=name)]
        part = outputs[-1].outputs[0]
        assert [next(iter(entry)) for entry in part.logprobs] == part.token_ids
        log_probs = [entry[token].logprob for token, entry in zip(part.token_ids, part.logprobs, strict=True)]
        return Answer(part.token_ids, log_probs, part.finish_reason)

    @property
    def sent(self) -> list[Sent]:
        return [
            Sent(
                prompt["prompt_token_ids"],
                prompt.get("cache_salt"),
                params.max_tokens,
                params.min_tokens,
                params.seed,
                priority,
            )
            for prompt, params, priority in zip(self.prompts, self.params, self.priorities, strict=True)
        ]

    @property
    def frozen(self) -> bool:
        return self.paused is not None


class Retryable(Exception):
    """vLLM's `RetryableRequestError`."""


class RejectingAsyncLLM(AsyncLLM):
    """As vLLM from 0.33: rejects new requests while it is paused, except by `keep`."""

    def __init__(self, late_s: float = 0.0, send_s: float = 0.0) -> None:
        super().__init__(late_s, send_s)
        self.rejected: list[str] = []

    def receive(self, name: str, request: Live) -> None:
        if self.paused in ("abort", "wait"):
            self.rejected.append(name)
            request.queue.put_nowait(Retryable("Generation is paused. Please retry after it resumes."))
        else:
            super().receive(name, request)

    def serve_versions(self) -> VersionedEngine[Any, Any]:
        engine: Any = self
        return serve_versions(engine, (Retryable,))
