# SPDX-License-Identifier: Apache-2.0
"""The agent loop manager: sends groups to workers, which push finished groups back."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Mapping
from typing import Any, ClassVar

import ray
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ

from ...core.recall import Recall
from ..control_calls import GROUPS
from ..direct_calls import ConnectionLost, DirectCaller
from ..restartable_actors import restartable
from ..run_config import open_requests_of
from .answers import Answered
from .partial_rollouts import RecordedRequest
from .worker import GIVE_UP_S, PushAgentLoopWorker

DEFAULT_CONCURRENCY = 1000
"""Ray's limit for the calls of an async actor."""
CLOSE_S = 10.0
"""Seconds that a worker gets to end what its episodes share. Its processes end with it in any case."""


class PushAgentLoopManager(AgentLoopManagerTQ):
    """verl's manager, plus one call a group. Select it through `agent_loop_manager_class`.

    A worker whose process ends is started again, and repeats its unfinished groups and validation prompts.
    """

    _early: ClassVar[PushAgentLoopManager | None] = None

    @classmethod
    def start_early(cls, **kwargs: Any) -> None:
        """Start the workers now, while servers are still starting; `create` then returns this manager."""
        cls._early = super().create(**kwargs)

    @classmethod
    def create(cls, *args: Any, **kwargs: Any) -> PushAgentLoopManager:
        """Return the manager that was started early in this process, or a new one."""
        early, cls._early = cls._early, None
        manager: PushAgentLoopManager = early or super().create(*args, **kwargs)
        return manager

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # A group that was given up may still be ending while its successor runs.
        groups = 2 * open_requests_of(self.config).groups
        self.agent_loop_workers_class = restartable(
            PushAgentLoopWorker, groups=GROUPS, max_concurrency=max(DEFAULT_CONCURRENCY, groups)
        )

    async def _init_agent_loop_workers(self) -> None:
        await super()._init_agent_loop_workers()
        self._turns = itertools.cycle([(one, DirectCaller(one)) for one in self.agent_loop_workers])

    def generate_sequences(self, prompts: Any) -> None:
        """Validate a batch of prompts; returns when their responses are in the sample store. Blocks.

        Raises ActorDiedError if a worker dies more often than Ray restarts it.
        """
        workers = self.agent_loop_workers
        parts = zip(workers, prompts.chunk(len(workers)), strict=False)
        ray.get([worker.run_validation.remote(part) for worker, part in parts])

    async def transcripts(self) -> dict[str, list[list[RecordedRequest]]]:
        """Return what was generated so far for all prompts in generation, response by response."""
        asked = [worker.transcripts.remote() for worker in self.agent_loop_workers]
        found: dict[str, list[list[RecordedRequest]]] = {}
        for one in await asyncio.gather(*asked):
            found.update(one)
        return found

    async def close(self) -> None:
        """End what the workers' episodes share, as far as the workers answer within `CLOSE_S` seconds."""
        asked = [asyncio.wait_for(_closed(worker), CLOSE_S) for worker in self.agent_loop_workers]
        await asyncio.gather(*asked, return_exceptions=True)

    async def run_group(self, prompt: Mapping[str, Any], recall: Recall, admitted: int) -> Answered | None:
        """Send one prompt to the next worker; see `PushAgentLoopWorker.run_group`.

        Returns None if the group was recalled and has been given up. If cancelled, which means that the
        run is being stopped, it ends when the group has been given up.
        """
        worker, caller = next(self._turns)
        answering = asyncio.create_task(_answered(caller, prompt, admitted))
        try:
            try:
                await recall.or_done(answering)
            except asyncio.CancelledError:
                await _give_up(worker, prompt)
                raise
            if answering.done():
                result: Answered = answering.result()
                return result

            await _give_up(worker, prompt)
            await asyncio.wait({answering}, timeout=GIVE_UP_S)
            return _samples_of(answering)
        finally:
            answering.cancel()


async def _answered(caller: DirectCaller, prompt: Mapping[str, Any], admitted: int) -> Answered:
    while True:
        try:
            answered: Answered = await caller.call("run_group", prompt, admitted)
            return answered
        except ConnectionLost:
            # The next call goes through Ray, which waits for the worker's restart or raises.
            continue


async def _closed(worker: Any) -> None:
    await worker.close.remote()


async def _give_up(worker: Any, prompt: Mapping[str, Any]) -> None:
    # A worker that is gone, or that does not reply, has no responses to give up.
    with contextlib.suppress(Exception):
        await asyncio.wait_for(worker.give_up.remote(str(prompt["uid"])), GIVE_UP_S)


def _samples_of(answering: asyncio.Future[Answered]) -> Answered | None:
    """Return what a group that was given up has left in the sample store, or None."""
    if not answering.done() or answering.exception() is not None:
        return None
    return answering.result() if answering.result().trajectories else None
