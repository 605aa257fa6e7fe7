# SPDX-License-Identifier: Apache-2.0
"""The agent loop manager: sends groups to workers, which push finished groups back."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import ray
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ

from ...core.groups.bad_data import Flaw
from ...core.groups.recall import Recall
from ...observe.causes import causes
from ..calls.control_calls import GROUPS
from ..calls.direct_calls import ConnectionLost, DirectCaller
from ..calls.ray_calls import got, restartable
from ..launch.run_config import open_requests_of
from ..store.sample_store import WriteShard
from .episodes.validation import Validated, merged
from .prompt_pictures import STORED
from .responses import Answered
from .worker import GIVE_UP_S, PushAgentLoopWorker

DEFAULT_CONCURRENCY = 1000
"""Ray's limit for the calls of an async actor."""
CLOSE_S = 10.0
"""Seconds that a worker gets to end what its episodes share. Its processes end with it in any case."""


class PushAgentLoopManager(AgentLoopManagerTQ):
    """verl's manager, plus one call a group. Select it through `agent_loop_manager_class`.

    A worker whose process ends is started again, and repeats its unfinished groups and validation prompts.
    """

    _validated: Sequence[Validated] = ()
    _early: ClassVar[PushAgentLoopManager | None] = None

    @classmethod
    def start_early(cls, **kwargs: Any) -> None:
        """Start the workers now, while servers are still starting; `create` then returns this manager."""
        cls._early = super().create(**kwargs)

    @classmethod
    def create(cls, *args: Any, **kwargs: Any) -> PushAgentLoopManager:
        """Return the manager that was started early in this process, or a new one."""
        early, cls._early = cls._early, None
        with causes():
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
        self._workers = [(one, DirectCaller(one)) for one in self.agent_loop_workers]
        self._turns = itertools.cycle(self._workers)
        self._readers = itertools.cycle(self.agent_loop_workers)
        self._resumed: dict[str, tuple[Any, DirectCaller]] = {}
        """The worker that has what an earlier process generated for a prompt, until it begins."""

    def generate_sequences(self, prompts: Any) -> None:
        """Validate a batch of prompts; returns when their responses are in the sample store. Blocks.

        Raises ActorDiedError if a worker dies more often than Ray restarts it.
        """
        workers = self.agent_loop_workers
        parts = zip(workers, prompts.chunk(len(workers)), strict=False)
        found = ray.get([worker.run_validation.remote(part) for worker, part in parts])
        self._validated = [*self._validated, *found]

    def take_validated(self) -> Validated:
        """Return what was validated since the last call."""
        found, self._validated = merged(self._validated), []
        return found

    def resume(self, checkpoint: Path, shards: Sequence[str], timeout_s: float | None) -> dict[str, int]:
        """Have the workers take what an earlier process generated; returns its tokens by prompt. Blocks.

        Raises CheckpointError if shards are damaged, WaitTimeout after `timeout_s` seconds.
        """
        asked = [
            worker.resume.remote(str(checkpoint), shards[number :: len(self._workers)])
            for number, (worker, _) in enumerate(self._workers)
        ]
        what = f"the agent loop workers to read {checkpoint}"
        found: dict[str, int] = {}
        taken = got(asked, timeout_s, owner="the start", what=what)
        for worker, tokens in zip(self._workers, taken, strict=True):
            found |= tokens
            self._resumed |= dict.fromkeys(tokens, worker)
        return found

    async def ask_teacher(self, keys: Sequence[str]) -> list[Flaw]:
        """Have the teacher of a group read its finished responses; see `teacher.ask`."""
        # Not in the turns of the groups, which would then not be even.
        flaws: list[Flaw] = await next(self._readers).ask_teacher.remote(keys)
        return flaws

    async def note_transcripts(self, uids: Sequence[str], version: int) -> list[WriteShard]:
        """Have the workers note what was generated so far for these prompts. Returns a function for each to
        write what is not newer than a version.
        """
        await asyncio.gather(*(worker.note_transcripts.remote(uids) for worker in self.agent_loop_workers))
        return [partial(worker.write_transcripts.remote, version) for worker in self.agent_loop_workers]

    async def close(self) -> None:
        """End what the workers' episodes share, as far as the workers answer within `CLOSE_S` seconds."""
        asked = [asyncio.wait_for(_closed(worker), CLOSE_S) for worker in self.agent_loop_workers]
        await asyncio.gather(*asked, return_exceptions=True)

    async def run_group(self, prompt: Mapping[str, Any], recall: Recall, admitted: int) -> Answered:
        """Send one prompt to the worker that has a part of it, or the next one; see
        `PushAgentLoopWorker.run_group`.

        Returns None if the group was recalled and has been given up. If cancelled, which means that the
        run is being stopped, it ends when the group has been given up.
        """
        uid = str(prompt["uid"])
        worker, caller = self._resumed.pop(uid) if uid in self._resumed else next(self._turns)
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
            # As a separate argument, which Ray resolves.
            stored = [prompt[STORED]] if STORED in prompt else []
            own = {name: value for name, value in prompt.items() if name != STORED}
            answered: Answered = await caller.call("run_group", own, admitted, *stored)
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


def _samples_of(answering: asyncio.Future[Answered]) -> Answered:
    """Return what a group that was given up has left in the sample store, or None."""
    if not answering.done() or answering.exception() is not None:
        return None
    done = answering.result()
    return done if done is not None and done[0].trajectories else None
