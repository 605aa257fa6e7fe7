# SPDX-License-Identifier: Apache-2.0
"""A rollout server whose engine costs nothing: it answers with a few random tokens after a drawn time.

It has the methods of `PipelineVLLMServer` that a run without faults and new replicas calls. Its process
imports neither verl nor torch, so that many servers start at once.
"""

from __future__ import annotations

import asyncio
import random
import time
from array import array
from typing import TYPE_CHECKING, Any

from ....core.groups.items import LoadReport
from ....verl_bridge.calls.control_calls import CONTROL, GIVE_UP, LOAD, ControlCalls, control
from ....verl_bridge.calls.direct_calls import Address, DirectCalls
from ....weight_sync.engine.serving_rank import OpenTime
from ....weight_sync.engine.versioned_engine import LoadMode
from ....weight_sync.memory.manifest import WeightTicket
from ..inputs.waits import LognormalWait

if TYPE_CHECKING:
    from verl.workers.rollout.replica import TokenOutput

TOKENS = (4, 16)
"""Range of the drawn length of a response."""
VOCABULARY = 256
LOG_PROB = -1.0


class IdleServer(ControlCalls):
    """The actor."""

    def __init__(self, rank: int, seed: int, answer_s: LognormalWait, tokens: int | None = None) -> None:
        """`tokens`: the length of every response, whose tokens are written when it begins; None draws it."""
        self._rank, self._answer_s, self._tokens = rank, answer_s, tokens
        self._seed, self._drawn = f"{seed}:{rank}", 0
        self._random = random.Random(self._seed)
        self._version: int | None = None
        self._answering: dict[str, asyncio.Task[Any]] = {}
        self._open = OpenTime()
        self.most_open = 0
        self._direct = DirectCalls(
            generate=self.generate,
            check=self.check,
            prepare_version=self.prepare_version,
            commit_version=self.commit_version,
        )

    async def generate(self, *, request_id: str, sampling_params: dict[str, Any], **_: Any) -> Any:
        """Return a `TokenOutput` with the fields that this package's server adds."""
        self.serve_control_calls()
        task = asyncio.current_task()
        assert task is not None
        self._answering[request_id] = task
        self.most_open = max(self.most_open, len(self._answering))
        self._open.begin(time.perf_counter())
        first = self._version
        self._drawn += 1
        try:
            await asyncio.sleep(self._answer_s.draw(0, self._seed, self._drawn))
        finally:
            self._open.end(time.perf_counter())
            del self._answering[request_id]

        length = self._tokens or self._random.randint(*TOKENS)
        tokens = self._random.choices(range(VOCABULARY), k=length)
        spans = [[first, 0]]
        if self._version != first:
            spans.append([self._version, len(tokens) // 2])
        return _Output(
            token_ids=tokens,
            log_probs=[LOG_PROB] * len(tokens) if sampling_params.get("logprobs") else None,
            stop_reason="completed",
            num_preempted=0,
            extra_fields={
                "global_steps": self._version,
                "min_global_steps": first,
                "max_global_steps": self._version,
                "num_cached_tokens": 0,
                "replica": f"replica {self._rank}",
                "version_spans": spans,
            },
        )

    @control(LOAD)
    async def prepare_version(
        self, offered: WeightTicket, memories: Any, timeout_s: float, stage: str
    ) -> str:
        """Return at once."""
        return ""

    @control(LOAD)
    async def commit_version(
        self, version: int, piece_bytes: int, timeout_s: float, how: LoadMode
    ) -> LoadReport:
        """Serve a version at once."""
        self._version = version
        return LoadReport(busy_s=self._open.take(time.perf_counter()))

    @control(CONTROL)
    async def check(self) -> None:
        """Return at once."""

    @control(GIVE_UP)
    async def give_up(self, request_id: str) -> None:
        """Abandon an open request. Unknown ids are ignored."""
        task = self._answering.get(request_id)
        if task is not None:
            task.cancel()

    @control(CONTROL)
    async def direct_address(self) -> Address:
        """Return where agent loop workers send requests without Ray."""
        return await self._direct.address()

    @control(CONTROL)
    async def written(self, request_ids: list[str]) -> dict[str, Any]:
        """Return the tokens of open requests, whose number is configured; nothing if it is drawn."""
        if self._tokens is None:
            return {}
        tokens = self._random.choices(range(VOCABULARY), k=self._tokens)
        log_probs = [float(-token) for token in tokens]
        return {
            name: (array("q", tokens), array("d", log_probs), [[self._version, 0]])
            for name in request_ids
            if name in self._answering
        }

    @control(CONTROL)
    async def open_requests(self) -> int:
        """Return the number of open requests."""
        return len(self._answering)

    async def most_open_requests(self) -> int:
        """Return the most requests that were open at the same time."""
        return self.most_open


class _Output:
    """A `TokenOutput` that is created where it is received: here, verl would have to be imported for it."""

    def __init__(self, **fields: Any) -> None:
        self._fields = fields

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (self._fields,)


def _received(fields: dict[str, Any]) -> TokenOutput:
    from verl.workers.rollout.replica import TokenOutput

    return TokenOutput.model_construct(**fields)
