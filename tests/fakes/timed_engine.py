# SPDX-License-Identifier: Apache-2.0
"""Engines in virtual time of which each token says its version: what they share, and the simplest one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from recipe.async_pipeline.core.groups.items import LoadReport
from recipe.async_pipeline.weight_sync.engine.response import Part
from recipe.async_pipeline.weight_sync.engine.versioned_engine import (
    AttemptOptions,
    AttemptTokens,
    Loaded,
    VersionedEngine,
    derived_seed,
)

PROMPT = [100, 101]
STEP_S = 1.0
LOG_PROB = 0.5
"""Of every token."""


class Answer(NamedTuple):
    """A response as its caller gets it."""

    token_ids: list[int]
    log_probs: list[float]
    reason: str | None


class Sent(NamedTuple):
    """A request as the engine gets it."""

    prompt: list[int]
    salt: str | None
    max_tokens: int
    min_tokens: int
    seed: int | None
    priority: int | None = None


@dataclass
class Ask:
    """A request of `PlainEngine`."""

    name: str
    max_tokens: int
    min_tokens: int = 2
    seed: int | None = None
    form: dict[str, str] | None = None


class Said(NamedTuple):
    """An output of `PlainEngine`."""

    tokens: list[int]
    reason: str | None


@dataclass
class _Live:
    tokens: list[int] = field(default_factory=list)
    ended: asyncio.Future[Said] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class PlainEngine:
    """The interface of `VersionedEngine`, without the details of a real engine."""

    rejections = ()

    def __init__(self, late_s: float = 0.0, send_s: float = 0.0) -> None:
        self.weights = -1
        self.late_s, self.send_s = late_s, send_s
        self.sent: list[Sent] = []
        self._live: dict[str, tuple[_Live, int]] = {}
        self._attempts: set[str] = set()
        self._behind: list[Callable[[], None]] = []
        self._loading = False
        self.frozen = self._frozen = False

    def serve_versions(self) -> VersionedEngine[Ask, Said]:
        self._versioned = VersionedEngine[Ask, Said](self)
        return self._versioned

    async def run(self) -> None:
        while True:
            await asyncio.sleep(STEP_S)
            for name, (live, max_tokens) in list(self._live.items()):
                if not self._frozen:
                    live.tokens.append(self.weights)
                    if len(live.tokens) == max_tokens:
                        self._end(name, "length")

    def _end(self, name: str, reason: str) -> None:
        live, _ = self._live.pop(name)
        said = Said(list(live.tokens), reason)
        asyncio.get_running_loop().call_later(self.late_s, live.ended.set_result, said)

    def _message(self, handle: Callable[[], None]) -> None:
        """One message after the other: what comes behind a load waits for it."""
        if self._loading:
            self._behind.append(handle)
        else:
            handle()

    async def ask(
        self, name: str, tokens: int, seed: int | None = None, form: dict[str, str] | None = None
    ) -> Answer:
        said = [said async for said in self._versioned.generate(Ask(name, tokens, seed=seed, form=form))][-1]
        return Answer(said.tokens, [LOG_PROB] * len(said.tokens), said.reason)

    def name(self, request: Ask) -> str:
        return request.name

    def has_form(self, request: Ask) -> bool:
        return request.form is not None

    def prompt_tokens(self, request: Ask) -> int:
        return len(PROMPT)

    async def attempt(self, request: Ask, how: AttemptOptions) -> AsyncGenerator[Said, None]:
        await asyncio.sleep(self.send_s)
        live, said = _Live(), len(how.written)
        self._attempts.add(request.name)
        seed = derived_seed(request.seed, said) if said and request.seed is not None else request.seed
        left = request.max_tokens - said
        self.sent.append(
            Sent(
                [*PROMPT, *how.written],
                how.salt,
                left,
                max(0, request.min_tokens - said),
                seed,
                how.priority,
            )
        )
        self._message(lambda: self._live.__setitem__(request.name, (live, left)))
        how.sent()
        try:
            yield await live.ended
        finally:
            self._attempts.remove(request.name)

    def part(self, output: Said) -> Part:
        return Part(output.tokens, output.reason == "abort", output)

    def log_probs(self, part: Part) -> list[float]:
        return [LOG_PROB] * len(part.token_ids)

    def finished(self, output: Said) -> bool:
        return output.reason is not None

    def joined(self, output: Said, before: Sequence[Part]) -> Said:
        return Said([*(token for part in before for token in part.token_ids), *output.tokens], output.reason)

    async def written(self, names: Sequence[str]) -> Mapping[str, AttemptTokens]:
        found = {name: list(self._live[name][0].tokens) for name in names if name in self._live}
        return {name: AttemptTokens(tokens, [LOG_PROB] * len(tokens)) for name, tokens in found.items()}

    async def pause(self, mode: str) -> None:
        self.frozen, self._frozen = True, mode == "freeze"
        if mode == "abort":
            # Also the ones that are about to be sent.
            await asyncio.sleep(self.send_s)
            for name in list(self._live):
                self._end(name, "abort")
        while mode != "freeze" and self._attempts:  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(STEP_S / 100)

    async def resume(self) -> None:
        self.frozen = self._frozen = False

    def loading(self, version: int, seconds: float) -> Callable[[], Awaitable[Loaded]]:
        async def load() -> Loaded:
            self._loading = True
            await asyncio.sleep(seconds / 2)
            self.weights = version
            progress = {name: len(live.tokens) for name, (live, _) in self._live.items()}
            self._loading = False
            for handle in self._behind:
                handle()
            self._behind.clear()
            await asyncio.sleep(seconds / 2)
            return Loaded([LoadReport()], progress)

        return load
