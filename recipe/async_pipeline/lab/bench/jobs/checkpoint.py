# SPDX-License-Identifier: Apache-2.0
"""Save checkpoints in the idle job of `control_plane`, and measure them: `async-pipeline bench checkpoint`.

At a checkpoint the groups of one step are finished, and the groups of another step are in flight with all of
their tokens. The model is an empty file, so that the figures are of the rest.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil

from ....checkpoint import store, tensor_tree
from ....core.flow_state import FlowState
from ....core.groups.items import StepBatch
from ....verl_bridge.agent_loop.tokens import partial_rollouts
from ....verl_bridge.agent_loop.tokens.partial_rollouts import tokens_in
from ....verl_bridge.trainer import checkpoint_contents
from ..checkpoint import READ, SAVED
from ..measuring.loop_lag import LagMeter
from ..measuring.spans import of_this_job
from .control_plane import IdleRun, IdleTaskRunner, IdleTrainer

POLL_S = 0.2
READY_S = 180.0
"""Seconds in which the groups of a step get finished, or in flight."""
MEMORY_EVERY_S = 0.005


class CheckpointRun(IdleRun):
    """A run whose steps wait until the next ones are where a checkpoint shall find them."""

    _lag: LagMeter
    _lagging: asyncio.Task[None] | None = None

    async def update(self, batch: StepBatch) -> StepBatch:
        """Return when the groups of this step and of the next one are finished."""
        groups = self.config.data.train_batch_size * min(2, self.schedule.last_step - batch.step + 1)

        async def are_finished() -> bool:
            return bool(len(list(self._state(batch.step).finished())) >= groups)

        await _until(are_finished)
        return batch

    async def finish_step(self, batch: StepBatch, facts: Any) -> None:
        """Also wait for the requests of the step after the next one, and begin to measure the event loop."""
        await super().finish_step(batch, facts)
        servers = [replica.servers[0] for replica in self.rollout_pool.replicas]
        groups = self.config.data.train_batch_size if batch.step + 2 <= self.schedule.last_step else 0

        async def are_open() -> bool:
            opened = sum(await asyncio.gather(*(one.open_requests.remote() for one in servers)))
            return bool(opened >= groups * self.config.actor_rollout_ref.rollout.n)

        await _until(are_open)
        gc.collect()
        self._lag = LagMeter(time.process_time)
        self._lagging = asyncio.create_task(self._lag.run())
        await asyncio.sleep(POLL_S)

    async def save(self, state: FlowState, *, models_read: Any, all_read: Any) -> bool:
        """Save, and record a span with the seconds until the train lane continues."""
        started, held_s = time.monotonic(), 0.0

        def read() -> None:
            nonlocal held_s
            held_s = time.monotonic() - started
            all_read()

        with PeakMemory() as memory:
            complete = await super().save(state, models_read=models_read, all_read=read)
        assert self._lagging is not None
        self._lagging.cancel()
        lag = self._lag.summary()
        of_this_job().add(
            SAVED,
            started,
            step=state.step,
            held_s=held_s,
            stall_s=lag["max"],
            own_stall_s=lag["own_max"],
            base_bytes=memory.base,
            more_bytes=memory.peak - memory.base,
        )
        return complete

    def _state(self, step: int) -> FlowState:
        return FlowState(step=step, queue=self._flow.queue.state(), ledger=self._flow.ledger.state())


async def _until(is_ready: Callable[[], Awaitable[bool]]) -> None:
    """Wait for a condition, but not for ever: the figures say what a checkpoint has found."""
    deadline = time.monotonic() + READY_S
    while not await is_ready():
        if time.monotonic() > deadline:
            return
        await asyncio.sleep(POLL_S)


class PeakMemory:
    """Samples the private memory of this process in a thread."""

    def __init__(self) -> None:
        self._process, self._ended = psutil.Process(), threading.Event()
        self.base = self.peak = self._private()
        self._thread = threading.Thread(target=self._sample, name="memory", daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(MEMORY_EVERY_S):
            self.peak = max(self.peak, self._private())

    def _private(self) -> int:
        memory = self._process.memory_info()
        return int(memory.rss - memory.shared)


class CheckpointTrainer(IdleTrainer):
    """verl's trainer of such a run; at its end it reads every checkpoint that was published."""

    run_class = CheckpointRun

    def fit(self, agent_loop_manager: Any) -> None:
        super().fit(agent_loop_manager)
        runtime = self.pipeline.runtime
        for folder in store.published(Path(self.config.trainer.default_local_dir)):
            with of_this_job().measure(READ, **_contents(folder, runtime.identity, runtime.run)):
                store.remove(folder)


def _contents(folder: Path, identity: Any, run: str) -> dict[str, Any]:
    """Read a checkpoint. Returns its number of rows and tokens, or why it cannot be read."""
    try:
        step = store.verify(folder, identity, run, contents=True).step
        state = checkpoint_contents.read(folder).state
        rows, tokens, in_flight = 0, 0, 0
        for shard in state.shards_of(checkpoint_contents.SAMPLES):
            samples = tensor_tree.read(store.require_shard(folder, shard))
            rows += len(samples)
            tokens += sum(len(row["responses"]) for row in samples.values())
        for shard in state.shards_of(checkpoint_contents.TRANSCRIPTS):
            in_flight += sum(map(tokens_in, partial_rollouts.read(str(folder), [shard]).values()))
        return {
            "step": step,
            "rows": rows,
            "finished": tokens,
            "in_flight": in_flight,
            "bytes": sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
        }
    except Exception as error:  # noqa: BLE001  it is a result of the measurement
        return {"error": f"{folder.name}: {error}"}


class CheckpointTaskRunner(IdleTaskRunner):
    """verl's task runner with such a trainer."""

    trainer_class = CheckpointTrainer
