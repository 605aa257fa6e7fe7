# SPDX-License-Identifier: Apache-2.0
"""vLLM's `AsyncLLM` as an engine that serves versions. Uses its objects by their attributes only."""

from __future__ import annotations

import copy
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple, Protocol

from ....weight_sync.engine.response import Part
from ....weight_sync.engine.versioned_engine import (
    AttemptOptions,
    AttemptTokens,
    VersionedEngine,
    derived_seed,
)

_PAUSE = {"abort": "abort", "drain": "wait", "freeze": "keep"}
"""vLLM's names of the pause modes."""


class AsyncEngine(Protocol):
    """The part of vLLM's `AsyncLLM` that is used here."""

    output_processor: Any
    generate: Callable[..., AsyncGenerator[Any, None]]
    add_request: Callable[..., Awaitable[Any]]

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None: ...

    async def resume_generation(self) -> None: ...


class VllmRequest(NamedTuple):
    """The arguments of `AsyncLLM.generate`."""

    prompt: Any
    params: Any
    request_id: str
    more: Mapping[str, Any]


def serve_versions(
    engine: AsyncEngine, rejections: tuple[type[Exception], ...] = ()
) -> VersionedEngine[VllmRequest, Any]:
    """Replace `generate` and `add_request` of an engine object.

    `rejections`: see the function of this name.
    """
    versioned = VersionedEngine[VllmRequest, Any](VllmEngine(engine, rejections))

    def generate(
        prompt: Any, sampling_params: Any, request_id: str, **more: Any
    ) -> AsyncGenerator[Any, None]:
        return versioned.generate(VllmRequest(prompt, sampling_params, request_id, more))

    engine.generate = generate
    return versioned


def rejections() -> tuple[type[Exception], ...]:
    """Return vLLM's errors for new requests while it is paused; vLLM 0.32 and earlier queue them instead."""
    error = getattr(sys.modules.get("vllm.exceptions"), "RetryableRequestError", None)
    return () if error is None else (error,)


def progress_by_name(progress: Mapping[str, int]) -> dict[str, int]:
    """Return the engine core's progress by name: vLLM appends random characters to ids."""
    return {internal.rpartition("-")[0]: tokens for internal, tokens in progress.items()}


class VllmEngine:
    """See `weight_sync.versioned_engine.Engine`."""

    def __init__(self, engine: AsyncEngine, rejections: tuple[type[Exception], ...] = ()) -> None:
        self._engine, self.rejections = engine, rejections
        self._generate, self._add_request = engine.generate, engine.add_request
        self._sent: dict[str, Callable[[], None]] = {}
        """To be called when the engine has got the request."""
        engine.add_request = self._add

    def name(self, request: VllmRequest) -> str:
        return request.request_id

    def prompt_tokens(self, request: VllmRequest) -> int:
        return len(request.prompt["prompt_token_ids"])

    def has_form(self, request: VllmRequest) -> bool:
        return request.params.structured_outputs is not None

    async def attempt(self, request: VllmRequest, how: AttemptOptions) -> AsyncGenerator[Any, None]:
        self._sent[request.request_id] = how.sent
        # verl's own priority is a number within a batch.
        more = request.more if how.priority is None else {**request.more, "priority": how.priority}
        try:
            outputs = self._generate(
                _prompt(request.prompt, how), _params(request.params, how), request.request_id, **more
            )
            async with aclosing(outputs):
                async for output in outputs:
                    yield output
        finally:
            self._sent.pop(request.request_id, None)

    async def _add(self, request_id: str, *args: Any, **kwargs: Any) -> Any:
        queue = await self._add_request(request_id, *args, **kwargs)
        self._sent.get(request_id, lambda: None)()
        return queue

    def part(self, output: Any) -> Part | None:
        if not output.outputs:
            return None
        found = output.outputs[0]
        return Part(found.token_ids, found.finish_reason == "abort", found)

    def log_probs(self, part: Part) -> Sequence[float] | None:
        return _chosen(part.token_ids, part.raw.logprobs)

    def finished(self, output: Any) -> bool:
        finished: bool = output.finished
        return finished

    def joined(self, output: Any, before: Sequence[Part]) -> Any:
        if before and output.outputs:
            raws = [part.raw for part in before]
            part = copy.copy(output.outputs[0])
            said = sum(len(one.token_ids) for one in raws)
            part.token_ids = [*(token for one in raws for token in one.token_ids), *part.token_ids]
            if part.logprobs is not None:
                part.logprobs = [*(entry for one in raws for entry in one.logprobs), *part.logprobs]
            if part.cumulative_logprob is not None:
                part.cumulative_logprob += sum(one.cumulative_logprob for one in raws)
            part.text = "".join([*(one.text for one in raws), part.text])
            output.outputs = [part]
            output.prompt_token_ids = output.prompt_token_ids[: len(output.prompt_token_ids) - said]
        return output

    async def written(self, names: Sequence[str]) -> Mapping[str, AttemptTokens]:
        states = {
            name.rpartition("-")[0]: state
            for name, state in self._engine.output_processor.request_states.items()
        }
        found = {}
        for name in names:
            if name in states:
                tokens = list(states[name].detokenizer.output_token_ids)
                found[name] = AttemptTokens(tokens, _chosen(tokens, states[name].logprobs_processor.logprobs))
        return found

    async def pause(self, mode: str) -> None:
        await self._engine.pause_generation(mode=_PAUSE[mode], clear_cache=False)

    async def resume(self) -> None:
        await self._engine.resume_generation()


def _chosen(tokens: Sequence[int], entries: Any) -> list[float] | None:
    """Return the log-prob of each token from vLLM's entries, which have the likeliest tokens too."""
    if entries is None or len(entries) < len(tokens):
        return None
    return [entries[index][token].logprob for index, token in enumerate(tokens)]


def _prompt(prompt: Any, how: AttemptOptions) -> Any:
    """Return the prompt with the tokens written after it. Only prompts of the same salt share its prefix."""
    if not isinstance(prompt, dict):
        return prompt
    more: dict[str, Any] = {} if how.salt is None else {"cache_salt": how.salt}
    if how.written:
        more["prompt_token_ids"] = [*prompt["prompt_token_ids"], *how.written]
    return {**prompt, **more}


def _params(params: Any, how: AttemptOptions) -> Any:
    """Return the sampling parameters for the rest of a response."""
    changed = copy.copy(params)
    if said := len(how.written):
        changed.max_tokens = params.max_tokens - said
        changed.min_tokens = max(0, params.min_tokens - said)
        if params.seed is not None:
            changed.seed = derived_seed(params.seed, said)
    # Outputs before the last one, and text, have no reader and cost time for each token.
    if not how.every_token:
        changed.output_kind = type(params.output_kind).FINAL_ONLY
    # Stop strings are looked for in the text.
    if not how.text and not params.stop:
        changed.detokenize = False
    return changed
