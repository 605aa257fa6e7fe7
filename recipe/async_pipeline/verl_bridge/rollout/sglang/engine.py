# SPDX-License-Identifier: Apache-2.0
"""SGLang's tokenizer manager as an engine that serves versions. Uses its objects by their attributes only."""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple, Protocol
from uuid import uuid4

from ....core.groups.items import LoadReport
from ....weight_sync.engine.response import Part
from ....weight_sync.engine.versioned_engine import (
    FORM,
    AttemptOptions,
    AttemptTokens,
    Loaded,
    Salts,
    VersionedEngine,
    derived_seed,
)
from .calls import SchedulerCalls, SchedulerReply, message, sender

FORMS = {"json": "json_schema", "structural_tag": "structural_tag"}
"""SGLang's parameters of the kinds of `FORM`."""
POLL_S = 0.02
"""Interval for aborting the requests that were sent meanwhile."""


class TokenizerManager(Protocol):
    """The part of SGLang's `TokenizerManager` that is used here."""

    generate_request: Callable[..., AsyncGenerator[dict[str, Any], None]]
    _send_one_request: Callable[[Any], Any]

    def abort_request(self, rid: str) -> Any: ...


class ServingEngine(NamedTuple):
    """An engine that serves versions."""

    versioned: VersionedEngine[Any, dict[str, Any]]
    calls: SchedulerCalls

    async def load(self, manifest: bytes, piece_bytes: int, salts: Salts | None = None) -> Loaded:
        """Load a version between two steps of the engine. Raises WeightSyncError or ProofError."""
        reports, progress = await self.calls.call("load", manifest, piece_bytes, salts)
        return Loaded([LoadReport(**of_rank) for of_rank in reports], progress_by_name(progress))


def serve_versions(
    manager: Any, dispatcher_class: Callable[..., Any], defaults: Mapping[str, Any] | None = None
) -> ServingEngine:
    """Replace `generate_request` and `_send_one_request` of a manager, and connect it with the scheduler.

    `dispatcher_class` is SGLang's `TypeBasedDispatcher`; `defaults` are sampling parameters of requests that
    do not set them.
    """
    send = sender(manager)
    calls = SchedulerCalls(lambda call: send(message(call)))
    manager._result_dispatcher += dispatcher_class([(SchedulerReply, calls.take)])
    manager.auto_create_handle_loop()
    versioned = VersionedEngine[Any, dict[str, Any]](SGLangEngine(manager, calls, defaults or {}))

    async def generate_request(request: Any, http: Any = None) -> AsyncGenerator[dict[str, Any], None]:
        last = None
        async with aclosing(versioned.generate(request)) as outputs:
            async for output in outputs:
                if getattr(request, "stream", False):
                    yield output
                else:
                    last = output
        # verl takes one output and leaves the generator where it is: the spans are recorded before that.
        if last is not None:
            yield last

    manager.generate_request = generate_request
    return ServingEngine(versioned, calls)


class SGLangEngine:
    """See `weight_sync.versioned_engine.Engine`. A request is a `GenerateReqInput` with token ids."""

    rejections = ()

    def __init__(self, manager: TokenizerManager, calls: SchedulerCalls, defaults: Mapping[str, Any]) -> None:
        self._manager, self._calls, self._defaults = manager, calls, defaults
        self._generate, self._send = manager.generate_request, manager._send_one_request
        self._frozen = False
        self._attempts: dict[str, str | None] = {}
        """The name of each attempt's request, by SGLang's id of the attempt."""
        self._sent: dict[str, Callable[[], None]] = {}
        """To be called when the scheduler gets the attempt; of attempts that are about to be sent."""
        manager._send_one_request = self._send_one

    def name(self, request: Any) -> str:
        name: str = request.rid
        return name

    def prompt_tokens(self, request: Any) -> int:
        return len(request.input_ids)

    def has_form(self, request: Any) -> bool:
        return bool(request.sampling_params.get(FORM))

    async def attempt(self, request: Any, how: AttemptOptions) -> AsyncGenerator[dict[str, Any], None]:
        if not _is_single(request):
            # From outside: a batch, or text.
            async for output in self._generate(request, None):
                yield output
            return
        # A new id for each attempt, because one that was stopped may not be forgotten yet. SGLang aborts all
        # requests whose ids begin with an id, so no id is the beginning of another.
        asked, own = _asked(request, how, self._defaults), f"{request.rid}-{uuid4().hex}"
        asked.rid = own
        self._attempts[own], self._sent[own] = request.rid, how.sent
        ended = False
        try:
            async with aclosing(self._generate(asked, None)) as outputs:
                async for output in outputs:
                    ended = self.finished(output)
                    yield output
        finally:
            if not ended:
                self._manager.abort_request(own)
            self._sent.pop(own, None)
            del self._attempts[own]

    def _send_one(self, tokenized: Any) -> Any:
        sent = self._send(tokenized)
        if inspect.isawaitable(sent):
            return self._sent_later(tokenized.rid, sent)
        self._sent.pop(tokenized.rid, lambda: None)()
        return sent

    async def _sent_later(self, rid: str, sending: Awaitable[Any]) -> Any:
        sent = await sending
        self._sent.pop(rid, lambda: None)()
        return sent

    def part(self, output: dict[str, Any]) -> Part | None:
        ids, aborted = output["output_ids"], _reason(output) == "abort"
        # The step after an abort writes one more token, which SGLang does not check for the end of the
        # response.
        return Part(ids[:-1] if aborted else ids, aborted, output)

    def log_probs(self, part: Part) -> Sequence[float] | None:
        entries = _entries(part)
        return [float(entry[0]) for entry in entries] if len(entries) == len(part.token_ids) else None

    def finished(self, output: dict[str, Any]) -> bool:
        return _reason(output) is not None

    def joined(self, output: dict[str, Any], before: Sequence[Part]) -> dict[str, Any]:
        if not before:
            return output
        meta = dict(output["meta_info"])
        said = [token for part in before for token in part.token_ids]
        if meta.get("output_token_logprobs") is not None:
            earlier = [entry for part in before for entry in _entries(part)]
            meta["output_token_logprobs"] = [*earlier, *meta["output_token_logprobs"]]
        ids = [*said, *output["output_ids"]]
        meta["completion_tokens"] = len(ids)
        return {**output, "output_ids": ids, "meta_info": meta}

    async def written(self, names: Sequence[str]) -> Mapping[str, AttemptTokens]:
        attempts = {own: name for own, name in self._attempts.items() if name in names}
        if not attempts:
            return {}
        found = await self._calls.call("written", list(attempts))
        return {str(attempts[own]): AttemptTokens(*parts) for own, parts in found.items()}

    async def pause(self, mode: str) -> None:
        if mode == "freeze":
            self._frozen = True
            await self._calls.call("freeze", True)
            return
        while self._attempts:
            if mode == "abort":
                # An order that overtakes its request has no effect, and SGLang may give it only once.
                for own in self._attempts.keys() - self._sent.keys():
                    self._manager.abort_request(own)
            # Polling is necessary: requests end in their callers' tasks.
            await asyncio.sleep(POLL_S)

    async def resume(self) -> None:
        if self._frozen:
            await self._calls.call("freeze", False)
            self._frozen = False


def progress_by_name(progress: Mapping[str, int]) -> dict[str, int]:
    """Return the scheduler's progress of attempts by the names of the requests."""
    return {own.rpartition("-")[0]: tokens for own, tokens in progress.items()}


def _entries(part: Part) -> Sequence[Any]:
    """Return log-prob, token and text of each token; empty if log-probs were not requested."""
    entries: Sequence[Any] = part.raw["meta_info"].get("output_token_logprobs") or ()
    return entries[: len(part.token_ids)]


def _is_single(request: Any) -> bool:
    return isinstance(request.input_ids, list) and all(isinstance(one, int) for one in request.input_ids)


def _reason(output: dict[str, Any]) -> str | None:
    reason = output["meta_info"].get("finish_reason")
    return str(reason["type"]) if isinstance(reason, dict) else reason


def _asked(request: Any, how: AttemptOptions, defaults: Mapping[str, Any]) -> Any:
    """Return a copy of the request for the rest of a response."""
    asked, said = copy.copy(request), len(how.written)
    asked.extra_key, asked.priority = how.salt, how.priority
    params = {**defaults, **request.sampling_params}
    # verl's names, which are vLLM's.
    for theirs, name in (("min_tokens", "min_new_tokens"), ("seed", "sampling_seed")):
        if theirs in params:
            params[name] = params.pop(theirs)
    if said:
        asked.input_ids = [*request.input_ids, *how.written]
        params["max_new_tokens"] -= said
        params["min_new_tokens"] = max(0, params.get("min_new_tokens", 0) - said)
        if params.get("sampling_seed") is not None:
            params["sampling_seed"] = derived_seed(params["sampling_seed"], said)
    for name, value in (params.pop(FORM, None) or {}).items():
        params[FORMS[name]] = value
    asked.sampling_params = params
    return asked
