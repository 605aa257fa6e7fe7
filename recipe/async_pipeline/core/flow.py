# SPDX-License-Identifier: Apache-2.0
"""The pipeline: wires the stages, runs one task per lane, ends cleanly or with the error that caused the end.

        admission (message queue)             ┌─► logp ─────┐           ┌─► critic ─┐
    dataloader ───────► generate ─► rollout ──┼─► ref_logp ─┼─► reward ─┴───────────┴─► train ─► param_update
        ▲                                     └─► values ───┘  (join, advantage)                     │
        └──────────────────────── versions: trained ≥ gathered ≥ served ◄────────────────────────────┘

What each stage waits for, and what unblocks it:

    dataloader    room in the message queue           a weight update is served
    generate      prompts, its pool                   dataloader
    teacher       finished groups                     generate, group by group
    rollout       finished groups                     generate or teacher, group by group
    logp          a full batch, its policy's weights  rollout; train; param_update's gather
    ref_logp      a full batch, its policy's weights  rollout; param_update's gather, if it is refreshed
    values        a full batch, critic of step-1      rollout; critic
    reward        the three of one batch              all of them
    critic        the scored batch                    reward
    train         the scored batch, gather of step-1  reward; param_update; critic, at once if on its devices
    param_update  an optimizer step                   train

Without a reference policy there is no ref_logp; without a critic, neither values nor critic. With
distillation, teacher stands between generate and rollout.

The end of data closes channels from left to right, so every prompt that was drawn has a fate by then. The
first error stops every other stage and is raised unchanged.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .channel import Channel
from .events import EventLog, Guard, unguarded
from .flow_state import FlowState
from .graph import graph_of, insert_role, role_class
from .groups.fates import FateRegister, Settlement
from .groups.items import Publication
from .groups.ledger import Ledger
from .lag.degradation import Change, Level, StepDown
from .lag.staleness import LagControl, Versions
from .pools import DevicePool, PoolSet
from .schedule import synchronous
from .stage import RoleStateMachine, create_role_state_machine
from .state_machine import TERMINAL, StageState
from .trainer_protocol import PipelineTrainer
from .waits.background import BackgroundWork, no_stray_cancellation
from .waits.clock import Clock, LoopClock
from .waits.progress import Excused
from .waits.retry import CheckpointTimes
from .waits.wait_graph import Holders

KEPT_PUBLICATIONS = 1000
"""Number of weight updates that are kept for the medians of the summary; `events.jsonl` has all of them."""
EDGE_CAPACITY = 2
"""Items that may wait between two batch stages; admission bounds the total, this bounds each edge."""


@dataclass(frozen=True, kw_only=True)
class FlowResult:
    """What a finished run did, including the processes that it was resumed from."""

    steps: int
    groups_drawn: int
    groups_trained: int
    groups_filtered: int
    groups_expired: int
    groups_failed: int
    groups_in_flight: int
    """Drawn, and without a fate; 0 after a completed run."""
    regenerated: int
    """Number of times that responses were generated again, because they held up a step or were flawed."""
    trajectories_trained: int
    lag_max: int
    trainer_version: int
    served_version: int
    weight_updates: int
    """Of this process, as the following two."""
    tensors_proved: int
    updates_skipped: int
    """Steps whose update the trainer did not apply, or not all of it, because gradients were not finite."""
    publications: tuple[Publication, ...]
    """The last weight updates, at most KEPT_PUBLICATIONS."""


class AsyncTrainingFlow:
    """Runs a trainer as a pipeline of stages.

    `enable_async_rl=False` admits a batch only when the weights of the previous step are served, for
    every strategy: the same code as an ordinary sequential trainer.
    """

    def __init__(
        self,
        trainer: PipelineTrainer,
        enable_async_rl: bool = True,
        *,
        clock: Clock | None = None,
        keep_records: int | None = None,
        startup_s: Callable[[], float] = lambda: 0.0,
        guard: Guard = unguarded,
    ) -> None:
        """`keep_records` bounds the events kept in memory; subscribers see all of them. `startup_s`
        returns how long the run took to start before the flow begins. `guard` wraps each subscriber of
        the event log; by default, an error of a subscriber ends the run.
        """
        self.trainer = trainer
        self.enable_async_rl = enable_async_rl
        self.clock = clock or LoopClock()
        self._startup_s = startup_s
        self.schedule = trainer.schedule if enable_async_rl else synchronous(trainer.schedule)
        self.max_lag = self.schedule.max_lag
        self.graph = graph_of(trainer.roles())
        self.versions = Versions()
        self.checkpoints = CheckpointTimes(self.schedule)
        self.queue = self.schedule.queue(self.versions)
        self.fates = FateRegister(first_step=self.schedule.first_step)
        self.ledger = Ledger(
            self.fates, max_lag=self.max_lag, last_step=self.schedule.last_step, facts=trainer.facts
        )
        self.fates.subscribe(self._leave_queue)
        self.queue.on_drop(lambda uid: self.fates.settle(uid, "expired", why="it held a step up"))
        self.publications: deque[Publication] = deque(maxlen=KEPT_PUBLICATIONS)
        self.weight_updates = self.tensors_proved = 0
        self.step_down = StepDown(trainer.caution)
        self.lag_control = LagControl(
            self.schedule.ess_floor,
            least=self.schedule.least_depth,
            most=self.queue.depth,
            depth=trainer.resumed.depth if trainer.resumed else None,
        )
        self._set_depth()
        self.machines: list[RoleStateMachine] = []
        self.log = EventLog(self.clock, keep=keep_records, guard=guard)
        self.pools: PoolSet | None = None
        self.excused = Excused()
        """Seconds in which stages wait for a checkpoint."""
        self._tasks: tuple[asyncio.Task[None], ...] = ()
        self.background = BackgroundWork(self._stop, lambda: self.stopping)
        self.failures: list[tuple[str, Exception]] = []
        """Errors in the order of their occurrence; the first is the cause."""
        self._runs_in: asyncio.Task[Any] | None = None
        """The task of `run` until it stops the stages."""
        started_with = self.schedule.first_step - 1
        if started_with:
            self.versions.advance_trained(started_with)
            self.versions.advance_critic(started_with)
            self.versions.advance_saved(started_with)
        self.resumed = trainer.resumed
        """The checkpoint that this process resumes from; None if the run starts from the beginning."""
        if self.resumed is not None:
            self.queue.restore(self.resumed.queue)
            self.ledger.restore(self.resumed.ledger, {group.uid for group in self.resumed.finished()})
            self.check_books()

    def insert(self, role_name: str, *, after: str, before: str) -> None:
        """Insert a registered custom stage into the edge `after` -> `before`, before the run starts.

        Raises ConfigError if the stage or the edge does not exist, or the stage is in the graph
        already.
        """
        insert_role(self.graph, role_name, after=after, before=before)

    async def run(self) -> FlowResult:
        """Publish the starting weights, then run every stage until the data ends.

        Raises the first error of any stage, unchanged, after all others have stopped.
        """
        self._wire()
        self.ledger.open()
        self.log.append(
            "flow",
            "START",
            "RUNNING",
            version=self.schedule.first_step - 1,
            max_lag=self.max_lag,
            startup_s=round(self._startup_s(), 6),
            graph={role: list(consumers) for role, consumers in self.graph.items()},
            pools={name: self._facts_of(name) for name in self.pools or ()},
        )
        try:
            await self._supervise()
            self.fates.check(())
        except BaseException as error:
            self.ledger.close("failed" if isinstance(error, Exception) else "interrupted")
            raise
        self.ledger.close("completed")
        self.log.append("flow", "DONE", "DONE", version=self.versions.served)
        return self.result()

    def result(self) -> FlowResult:
        return FlowResult(
            steps=self.fates.step,
            groups_drawn=self.fates.drawn,
            groups_trained=self.fates.count("trained"),
            groups_filtered=self.fates.count("filtered"),
            groups_expired=self.fates.count("expired"),
            groups_failed=self.fates.count("failed"),
            groups_in_flight=len(self.fates.in_flight),
            regenerated=self.ledger.regenerated,
            trajectories_trained=self.ledger.trajectories_trained,
            lag_max=self.ledger.lag_max,
            trainer_version=self.versions.trained,
            served_version=self.versions.served,
            weight_updates=self.weight_updates,
            tensors_proved=self.tensors_proved,
            updates_skipped=self.ledger.skipped,
            publications=tuple(self.publications),
        )

    @property
    def stopping(self) -> bool:
        """Whether tasks of stages may be cancelled now: the run is being stopped, or is not in progress."""
        if self._runs_in is None:
            return True
        # Python 3.10 does not count cancellations. It matters only to a loop that cancels all its tasks.
        cancelling: Callable[[], int] = getattr(self._runs_in, "cancelling", lambda: 0)
        return cancelling() > 0

    def _stop(self, role: str, error: Exception) -> None:
        """Stop all stages; the error is raised when they have stopped."""
        if any(error is known for _, known in self.failures):
            return
        self.failures.append((role, error))
        self._runs_in = None
        for stage in self._tasks:
            stage.cancel()

    def check_books(self) -> None:
        """Raise ConservationError if the prompts in flight differ from the prompts in the pipeline."""
        self.fates.check(self.queue.live)

    def state(self, step: int) -> FlowState:
        """Return what a checkpoint of `step` holds; call it after that step was trained, before the
        next one.

        Raises ConservationError if the books do not balance.
        """
        self.check_books()
        depth = self.lag_control.depth
        return FlowState(step=step, queue=self.queue.state(), ledger=self.ledger.state(), depth=depth)

    def measured(self, step: int, share: float | None) -> str | None:
        """Take the effective sample size of a step, as a share; returns why the lag has changed, or None."""
        why = self.lag_control.trained(step, share)
        if why is not None:
            self._set_depth()
        return why

    def published(self, publication: Publication) -> Change | None:
        """Record a finished weight update; returns the change of asynchrony, or None."""
        self.publications.append(publication)
        self.weight_updates += 1
        self.tensors_proved += publication.tensors_proved
        change = (
            self.step_down.failed(publication.failure) if publication.failure else self.step_down.succeeded()
        )
        if change is not None:
            self._set_depth()
        return change

    def _set_depth(self) -> None:
        """Allow as many batches ahead as both the effective sample size and the weight updates permit."""
        depth = self.lag_control.depth
        cautious = min(depth, self.schedule.least_depth)
        self.queue.depth = cautious if self.step_down.level is Level.ON_POLICY else depth
        self.queue.depth_changed()

    def describe(self, machines: Iterable[RoleStateMachine]) -> Holders:
        """Describe the states of some stages, for the message of an expired wait."""
        machines = tuple(machines)
        states = ", ".join(f"{m.name} is {m.state.name}" for m in machines)
        running = ", ".join(m.name for m in self.machines if m.state is StageState.RUNNING)
        v = self.versions
        text = (
            f"{states or 'no stage feeds it'}; running: {running or 'none'}; "
            f"versions trained {v.trained}, gathered {v.gathered}, served {v.served}"
        )
        return Holders(text, (m.name for m in machines if m.state not in TERMINAL))

    def _leave_queue(self, settled: Settlement) -> None:
        """Free the places in the message queue; a prompt that expires has left it before it is settled."""
        if settled.step is not None:
            self.queue.trained(settled.step)
        elif settled.fate != "expired":
            for uid in settled.uids:
                self.queue.give_back(uid)

    def _wire(self) -> None:
        with no_stray_cancellation(lambda: "the wiring of the stages", lambda: False):
            lanes = {role: role_class(role).lanes(self) for role in self.graph}
        self.pools = PoolSet(
            {
                name: DevicePool(name, devices, slots=self._slots(name, lanes), clock=self.clock)
                for name, devices in self.trainer.pools().items()
            }
        )
        channels: dict[tuple[str, str], Channel[Any]] = {
            (a, b): Channel(f"{a}->{b}", EDGE_CAPACITY, producers=lanes[a])
            for a, bs in self.graph.items()
            for b in bs
        }
        for role in self.graph:
            pool = self.trainer.pool_of(role)
            for lane in range(lanes[role]):
                machine = create_role_state_machine(role, self, self.trainer, self.enable_async_rl, lane)
                machine.inputs = tuple(ch for (_, b), ch in channels.items() if b == role)
                machine.outputs = tuple(ch for (a, _), ch in channels.items() if a == role)
                machine.pool = None if pool is None else self.pools.get(pool)
                self.machines.append(machine)

    def _facts_of(self, pool: str) -> dict[str, Any]:
        assert self.pools is not None
        tenants = [role for role in self.graph if self.trainer.pool_of(role) == pool]
        return {
            "devices": self.pools.get(pool).devices,
            "slots": self.pools.get(pool).slots,
            "roles": tenants,
        }

    def _slots(self, pool: str, lanes: Mapping[str, int]) -> int:
        """Return the slots of a pool: exclusive, unless its only stage has several lanes, which share it."""
        tenants = [role for role in self.graph if self.trainer.pool_of(role) == pool]
        return lanes[tenants[0]] if len(tenants) == 1 else 1

    async def _supervise(self) -> None:
        self._runs_in = asyncio.current_task()
        self._tasks = tasks = tuple(asyncio.create_task(m.run(), name=m.name) for m in self.machines)
        watch = asyncio.create_task(self._watch(), name="watch")
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            self._runs_in = None
            others = (watch, *self.background.tasks)
            for task in (*tasks, *others):
                task.cancel()
            await asyncio.gather(*tasks, *others, return_exceptions=True)
        if self.failures:
            role, error = self.failures[0]
            self.log.append("flow", "FAILED", "FAILED", why=f"{role}: {type(error).__name__}: {error}"[:500])
            vars(error)["stage"] = role  # for the summary and the line about the cause
            raise error

    async def _watch(self) -> None:
        try:
            with no_stray_cancellation(lambda: "the trainer's watch", lambda: self.stopping):
                await self.trainer.watch()
        except Exception as error:  # noqa: BLE001  it is raised when all stages have stopped
            self._stop("watch", error)
