# SPDX-License-Identifier: Apache-2.0
"""SGLang's tokenizer manager with its scheduler, in virtual time: each token is its version."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from recipe.async_pipeline.core.groups.items import LoadReport
from recipe.async_pipeline.verl_bridge.rollout.sglang.calls import SchedulerCall, SchedulerReply
from recipe.async_pipeline.verl_bridge.rollout.sglang.engine import progress_by_name, serve_versions
from recipe.async_pipeline.weight_sync.engine.versioned_engine import FORM, Loaded, VersionedEngine
from tests.fakes.timed_engine import LOG_PROB, PROMPT, STEP_S, Answer, Sent


@dataclass
class Request:
    """SGLang's `GenerateReqInput`."""

    rid: str
    input_ids: list[int]
    sampling_params: dict[str, Any]
    extra_key: str | None = None
    priority: int | None = None


@dataclass
class Live:
    """SGLang's `Req`, and the state of the manager for it."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    abort: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    output: dict[str, Any] = field(default_factory=dict)


class Dispatcher:
    """SGLang's `TypeBasedDispatcher`."""

    def __init__(self, handlers: list[tuple[type, Callable[[Any], object]]]) -> None:
        self.handlers = dict(handlers)

    def __iadd__(self, other: Dispatcher) -> Dispatcher:
        self.handlers |= other.handlers
        return self


class TokenizerManager:
    def __init__(self, late_s: float = 0.0, send_s: float = 0.0) -> None:
        self.weights = -1
        self.late_s, self.send_s = late_s, send_s
        self.sent: list[Sent] = []
        self.frozen = False
        self.live: dict[str, Live] = {}
        """What the scheduler has."""
        self._known: dict[str, Live] = {}
        """What the manager has."""
        self._behind: list[Callable[[], None]] = []
        self._loading = False
        self._result_dispatcher = Dispatcher([])
        self.send_to_scheduler = SimpleNamespace(send_pyobj=self._send_call)
        self._send_one_request: Callable[[Any], Any] = self._put
        self.generate_request: Callable[..., AsyncGenerator[dict[str, Any], None]] = self._generate

    def auto_create_handle_loop(self) -> None:
        """Nothing: replies arrive by themselves."""

    async def run(self) -> None:
        while True:
            await asyncio.sleep(STEP_S)
            for live in list(self.live.values()) if not self.frozen else []:
                live.tokens.append(self.weights)
                if live.abort:
                    # As SGLang: one token more, which may have been the last.
                    self._end(live, "abort")
                elif len(live.tokens) == live.request.sampling_params["max_new_tokens"]:
                    self._end(live, "length")

    def _end(self, live: Live, reason: str) -> None:
        del self.live[live.request.rid]
        entries = [(LOG_PROB, token, None) for token in live.tokens]
        live.output = {
            "output_ids": list(live.tokens),
            "meta_info": {"finish_reason": {"type": reason}, "output_token_logprobs": entries},
        }
        asyncio.get_running_loop().call_later(self.late_s, live.ended.set)

    def _message(self, handle: Callable[[], None]) -> None:
        """One message after the other: what comes behind a load waits for it."""
        if self._loading:
            self._behind.append(handle)
        else:
            handle()

    async def _generate(self, asked: Request, http: None) -> AsyncGenerator[dict[str, Any], None]:
        assert asked.rid not in self._known, "SGLang refuses an id that it still knows"
        live = self._known[asked.rid] = Live(asked)
        await asyncio.sleep(self.send_s)
        sent = self._send_one_request(SimpleNamespace(rid=asked.rid, live=live))
        if sent is not None:
            await sent
        await live.ended.wait()
        del self._known[asked.rid]
        yield live.output

    def _put(self, tokenized: Any) -> None:
        live: Live = tokenized.live
        asked, params = live.request, live.request.sampling_params
        least, seed = params.get("min_new_tokens", 0), params.get("sampling_seed")
        most = params["max_new_tokens"]
        self.sent.append(Sent(asked.input_ids, asked.extra_key, most, least, seed, asked.priority))
        self._message(lambda: self.live.__setitem__(asked.rid, live))

    def abort_request(self, rid: str) -> None:
        if rid in self._known:
            self._message(lambda: self._abort(rid))

    def _abort(self, rid: str) -> None:
        for known, live in list(self.live.items()):
            if not known.startswith(rid):
                continue
            if live.tokens:
                live.abort = True
            else:
                self._end(live, "abort")

    def _send_call(self, call: SchedulerCall) -> None:
        self._message(lambda: self._call(call))

    def _call(self, call: SchedulerCall) -> None:
        value = None
        if call.method == "freeze":
            (self.frozen,) = call.arguments
        elif call.method == "written":
            found = {rid: list(live.tokens) for rid, live in self.live.items() if rid in call.arguments[0]}
            value = {rid: (tokens, [LOG_PROB] * len(tokens)) for rid, tokens in found.items()}
        self._result_dispatcher.handlers[SchedulerReply](SchedulerReply(call.number, value))

    # The face of all fake engines.

    def serve_versions(self) -> VersionedEngine[Any, Any]:
        return serve_versions(self, Dispatcher).versioned

    async def ask(
        self, name: str, tokens: int, seed: int | None = None, form: dict[str, str] | None = None
    ) -> Answer:
        params: dict[str, Any] = {"max_new_tokens": tokens, "min_tokens": 2}
        params |= ({} if seed is None else {"seed": seed}) | ({} if form is None else {FORM: form})
        request = Request(name, list(PROMPT), params)
        # As verl does, which leaves the generator after its first output.
        output = await self.generate_request(request, None).__anext__()
        assert request == Request(name, list(PROMPT), params), "the caller's request is left alone"
        meta = output["meta_info"]
        assert [token for _, token, _ in meta["output_token_logprobs"]] == output["output_ids"]
        log_probs = [value for value, _, _ in meta["output_token_logprobs"]]
        return Answer(output["output_ids"], log_probs, meta["finish_reason"]["type"])

    def loading(self, version: int, seconds: float) -> Callable[[], Awaitable[Loaded]]:
        async def load() -> Loaded:
            self._loading = True
            await asyncio.sleep(seconds / 2)
            self.weights = version
            progress = {rid: len(live.tokens) for rid, live in self.live.items()}
            self._loading = False
            for handle in self._behind:
                handle()
            self._behind.clear()
            await asyncio.sleep(seconds / 2)
            return Loaded([LoadReport()], progress_by_name(progress))

        return load


class LaterTokenizerManager(TokenizerManager):
    """As SGLang from 0.5.23: sends requests by a coroutine, and the order to abort one only once."""

    def __init__(self, late_s: float = 0.0, send_s: float = 0.0) -> None:
        super().__init__(late_s, send_s)
        self.send_to_scheduler = SimpleNamespace()
        self._dispatch_to_scheduler = self._send_call
        self._send_one_request = self._put_later
        self._abort_sent: set[str] = set()

    async def _put_later(self, tokenized: Any) -> None:
        await asyncio.sleep(self.send_s)
        self._put(tokenized)

    def abort_request(self, rid: str) -> None:
        if rid not in self._abort_sent:
            self._abort_sent.add(rid)
            super().abort_request(rid)
