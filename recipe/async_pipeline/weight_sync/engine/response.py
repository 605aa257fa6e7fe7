# SPDX-License-Identifier: Apache-2.0
"""What an engine's server knows of one response: its attempts, when they may pass, and their versions."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

from ...core.groups.items import TokenSpan


class Part(NamedTuple):
    """What one attempt has generated."""

    token_ids: Sequence[int]
    aborted: bool
    """It is the end of a request that `Engine.pause` has stopped."""
    raw: Any
    """The engine's own form."""


@dataclass
class ResponseRecord:
    """One request that the engine has, or is about to get."""

    prompt_tokens: int
    spans: list[TokenSpan] = field(default_factory=list)
    before: list[Part] = field(default_factory=list)
    """What the attempts have generated that loads have stopped."""
    part: Part | None = None
    """What this attempt has generated, as far as it was seen."""
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
        self.spans = [*(span for span in self.spans if span.start < start), TokenSpan(version, start)]

    def begin_attempt(self, version: int | None) -> None:
        """Forget the attempt before; `version` is the served one."""
        self.part, self.sent_before, self.interrupted, self.stopped_by_load = None, None, False, False
        if version is not None:
            self.begin(version, self.base)

    def end_attempt(self, *, kept: bool = True) -> None:
        """End an attempt that a load has stopped. `kept`: the next one continues what it has generated."""
        if self.part is not None and kept:
            self.before.append(self.part)
        self.part = None

    def take(self, part: Part | None, finished: bool) -> bool:
        """Record an output; return False if it only reports that a load has stopped the request."""
        self.part = part or self.part
        aborted = self.part is None or self.part.aborted
        self.stopped_by_load = self.interrupted and finished and aborted
        return not self.stopped_by_load

    def written_spans(self) -> list[TokenSpan]:
        """Return the spans that have tokens; for an empty response, the first one."""
        return [span for span in self.spans if span.start < self.total] or self.spans[:1]


class AttemptGate:
    """Attempts pass while it is open. When it opens, they pass in the order in which their requests came."""

    def __init__(self) -> None:
        self.is_open = True
        self.closings = 0
        """How often it was closed: an attempt that passed before may have reached a paused engine."""
        self._arrivals = itertools.count()
        self._held: list[tuple[int, asyncio.Future[None]]] = []

    def arrive(self) -> int:
        """Return the number of a request, for all of its attempts."""
        return next(self._arrivals)

    async def passed(self, arrival: int) -> int:
        """Return `closings` as soon as an attempt may begin.

        Waits for: an open gate. Unblocked by: `open`.
        """
        while not self.is_open:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._held.append((arrival, turn))
            await turn
        return self.closings

    def close(self) -> None:
        self.is_open = False
        self.closings += 1

    def open(self) -> None:
        self.is_open = True
        held, self._held = sorted(self._held, key=itemgetter(0)), []
        for _, turn in held:
            if not turn.done():  # otherwise its request was cancelled
                turn.set_result(None)
