# SPDX-License-Identifier: Apache-2.0
"""A stage of the pipeline: one state machine with its own produce and consume loop.

    receive (join of all inputs) -> gate -> lease -> process -> emit
       WAITING_INPUT                WAITING_RESOURCE  RUNNING   WAITING_OUTPUT

A stage runs on one or more *lanes*. Each lane is a separate machine that reads from the same channels, so a
stage with two lanes works on two items at once. `concurrent_stage` has one that works on any number at once.
Nothing else is concurrent.

To add a custom stage: subclass `RoleStateMachine`, implement `process`, decorate the class with
`@register_role("name")` and insert it with `AsyncTrainingFlow.insert("name", after=…, before=…)`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from ..errors import ChannelClosed, ConfigError, StageProtocolError
from .channel import Channel
from .lag.staleness import MADE_BY, VersionKind
from .pools import DevicePool, Lease
from .state_machine import TERMINAL, Event, StageState, StateMachine
from .waits.background import no_stray_cancellation
from .waits.deadline import within

if TYPE_CHECKING:
    from .events import EventLog
    from .flow_state import FlowState
    from .groups.fates import FateRegister
    from .groups.items import Publication
    from .groups.ledger import Ledger
    from .groups.message_queue import MessageQueue
    from .lag.degradation import Change, StepDown
    from .lag.staleness import Versions
    from .schedule import Schedule
    from .trainer_protocol import PipelineTrainer
    from .waits.background import BackgroundWork
    from .waits.clock import Clock
    from .waits.progress import Excused
    from .waits.retry import CheckpointTimes
    from .waits.wait_graph import Holders

T = TypeVar("T")
R = TypeVar("R", bound="type[RoleStateMachine]")

ROLES: dict[str, type[RoleStateMachine]] = {}


class Pipeline(Protocol):
    """The pipeline as its stages see it: `core/flow.py:AsyncTrainingFlow`."""

    enable_async_rl: bool
    clock: Clock
    schedule: Schedule
    max_lag: int
    graph: dict[str, tuple[str, ...]]
    versions: Versions
    queue: MessageQueue
    fates: FateRegister
    ledger: Ledger
    checkpoints: CheckpointTimes
    step_down: StepDown
    machines: list[RoleStateMachine]
    log: EventLog
    excused: Excused
    """Seconds in which stages wait for a checkpoint."""
    background: BackgroundWork
    failures: list[tuple[str, Exception]]
    """Errors in the order of their occurrence; the first is the cause."""
    resumed: FlowState | None
    """The checkpoint that this process resumes from; None if the run starts from the beginning."""

    @property
    def stopping(self) -> bool:
        """Whether tasks of stages may be cancelled now."""

    def check_books(self) -> None:
        """Raise ConservationError if the prompts in flight differ from the prompts in the pipeline."""

    def state(self, step: int) -> FlowState:
        """Return what a checkpoint of `step` holds."""

    def published(self, publication: Publication) -> Change | None:
        """Record a finished weight update; returns the change of asynchrony, or None."""

    def measured(self, step: int, share: float | None) -> str | None:
        """Take the effective sample size of a step, as a share; returns why the lag has changed, or None."""

    def describe(self, machines: Iterable[RoleStateMachine]) -> Holders:
        """Describe the states of some stages, for the message of an expired wait."""


class RoleStateMachine(ABC):
    """One lane of one stage. Subclasses implement the work on an item; this class does the rest."""

    role: ClassVar[str]

    def __init__(self, *, pipeline: Pipeline, trainer: PipelineTrainer, lane: int = 0) -> None:
        self.pipeline = pipeline
        self.trainer = trainer
        self.lane = lane
        self.inputs: tuple[Channel[Any], ...] = ()
        self.outputs: tuple[Channel[Any], ...] = ()
        self.machine = StateMachine(self.role, lane, pipeline.log)
        self.pool: DevicePool | None = None
        self._lease: Lease | None = None
        self._item: dict[str, Any] = {}

    @classmethod
    def lanes(cls, pipeline: Pipeline) -> int:
        """Return how many items this stage may work on at once in this pipeline."""
        return 1

    @property
    def state(self) -> StageState:
        return self.machine.state

    @property
    def item(self) -> Mapping[str, Any]:
        """The current item as the event log shows it; empty between items."""
        return self._item

    @property
    def name(self) -> str:
        return self.role if self.lane == 0 else f"{self.role}[{self.lane}]"

    # What subclasses implement.

    @abstractmethod
    async def process(self, item: Any) -> None:
        """Work on one item and hand the results on with `emit`. The lease is held until this returns
        or releases it.

        RUNNING means computing: the work after the last `emit` counts as output.
        """

    async def gate(self, item: Any) -> None:  # noqa: B027 - optional hook
        """Wait until the item may be worked on; the default waits for nothing."""

    async def receive(self) -> Any:
        """Return the next item: one from each input, all of the same step.

        Waits for: every producer. Raises ChannelClosed if the inputs have ended and are drained.
        """
        items = await self.joined(self.inputs)
        return items[0] if len(items) == 1 else tuple(items)

    async def joined(self, channels: Iterable[Channel[Any]]) -> list[Any]:
        """Return one item from each of some inputs, all of the same step.

        Waits for: their producers. Raises ChannelClosed if one of them has ended and is drained.
        """
        items = [await self._receive_from(channel) for channel in channels]
        steps = {getattr(item, "step", None) for item in items}
        if len(steps) > 1:
            raise StageProtocolError(f"{self.name} joined items of different steps {sorted(map(str, steps))}")
        return items

    def input_from(self, role: str) -> Channel[Any] | None:
        """Return the input that another stage feeds directly, or None."""
        return next((ch for ch in self.inputs if ch.name == f"{role}->{self.role}"), None)

    def describe_item(self, item: Any) -> dict[str, Any]:
        """Return the fields that the event log shows with each event of this item."""
        first = item[0] if isinstance(item, tuple) else item
        fields = {"step": getattr(first, "step", None), "key": getattr(first, "uid", None)}
        return {k: v for k, v in fields.items() if v is not None}

    # What subclasses call.

    async def emit(self, item: Any, *, more: bool = False) -> None:
        """Hand an item to every output. With `more=True` the stage continues to compute afterwards.

        Waits for: room in each output channel. Raises ChannelClosed if the run is being stopped.
        """
        self.machine.fire(Event.OUTPUT, **self._item)
        for channel in self.outputs:
            await self._wait(channel.send(item), f"room in {channel.name}", self._consumers(channel))
        if more:
            self.machine.fire(Event.RESUME, **self._item)

    async def compute_again(self) -> None:
        """Take the lease again after the last `emit`.

        Waits for: the pool. Unblocked by: the release of the current lease.
        """
        self._lease = await self._acquire()
        self.note("LEASE")
        self.machine.fire(Event.RESUME, **self._item)

    def release(self) -> None:
        """Release the lease before `process` returns; the rest of the item needs no device."""
        if self._lease is not None and self.pool is not None:
            lease, self._lease = self._lease, None
            self.pool.release(lease)
            self.note("RELEASE", pool=self.pool.name)

    def note(self, event: str, **fields: Any) -> None:
        """Log a fact that changes no state."""
        lane = {"lane": self.lane} if self.lane else {}
        self.pipeline.log.append(self.role, event, self.state.name, **lane, **{**self._item, **fields})

    async def until(self, kind: VersionKind, version: int) -> None:
        """Return once a version is trained, gathered or served, or the critic has learned from that
        step.

        A wait is noted as GATED, `on` the stage that makes the version. Waits for: that stage.
        Unblocked by: its next step.
        """
        if self.pipeline.versions.reached(kind) >= version:
            return
        maker = MADE_BY[kind]
        self.note("GATED", on=maker, version=version)
        what = (
            f"the critic to have learned from step {version}"
            if kind == "critic"
            else f"version {version} to be {kind}"
        )
        await self._wait(
            self.pipeline.versions.wait_for(kind, version),
            what,
            lambda: self.pipeline.describe(m for m in self.pipeline.machines if m.role in ("train", maker)),
        )

    # The loop.

    async def run(self) -> None:
        """Work until the inputs end. On failure or stop, release the lease; the state tells which it was."""
        self.machine.fire(Event.START)
        try:
            with self._no_stray_cancellation():
                await self._consume()
                await self.drained()
            self.machine.fire(Event.END_OF_INPUT)
            for channel in self.outputs:
                channel.close()
        except BaseException as error:
            self._end(error)
            raise

    async def drained(self) -> None:  # noqa: B027 - optional hook
        """Called once when the inputs have ended, before the outputs are closed."""

    async def _consume(self) -> None:
        """Work on items until the inputs have ended."""
        while True:
            try:
                item = await self.receive()
            except ChannelClosed:
                return
            await self._work(item)

    async def _receive_from(self, channel: Channel[Any]) -> Any:
        return await self._wait(channel.receive(), f"an item from {channel.name}", self._producers(channel))

    async def _work(self, item: Any) -> None:
        self._item = self.describe_item(item)
        await self.gate(item)
        self.machine.fire(Event.ITEM, **self._item)
        self._lease = await self._acquire()
        self.machine.fire(Event.LEASE, **self._item)
        await self.process(item)
        self.release()
        self.machine.fire(Event.FINISH, **self._item)
        self._item = {}

    async def _acquire(self) -> Lease | None:
        if self.pool is None:
            return None
        return await self._wait(
            self.pool.acquire(self.name), f"a lease on pool {self.pool.name}", self.pool.describe
        )

    @property
    def _stopping(self) -> bool:
        """Whether the tasks of this stage may be cancelled now."""
        return self.pipeline.stopping

    def _no_stray_cancellation(self) -> AbstractContextManager[None]:
        def describe() -> str:
            item = "".join(f", {name} {value}" for name, value in self._item.items())
            return f"stage {self.name} ({self.state.name}{item})"

        return no_stray_cancellation(describe, lambda: self._stopping)

    def _end(self, error: BaseException) -> None:
        self.release()
        if self.state not in TERMINAL:
            if isinstance(error, Exception):
                self.pipeline.failures.append((self.name, error))
                self.machine.fire(Event.FAIL, why=f"{type(error).__name__}: {error}"[:500])
            else:
                self.machine.fire(Event.STOP)

    async def _wait(self, awaitable: Awaitable[T], what: str, holder: Callable[[], str]) -> T:
        return await within(
            awaitable,
            self.trainer.wait_timeout_s,
            owner=self.name,
            what=what,
            holder=holder,
            excused_s=self.pipeline.excused.seconds,
        )

    def _producers(self, *channels: Channel[Any]) -> Callable[[], str]:
        return lambda: self.pipeline.describe(
            m for m in self.pipeline.machines if any(channel in m.outputs for channel in channels)
        )

    def _consumers(self, channel: Channel[Any]) -> Callable[[], str]:
        return lambda: self.pipeline.describe(m for m in self.pipeline.machines if channel in m.inputs)


def register_role(name: str) -> Callable[[R], R]:
    """Register a stage class under `name`. A name belongs to one class."""

    def decorate(cls: R) -> R:
        known = ROLES.get(name)
        if known is not None and known.__qualname__ != cls.__qualname__:
            raise ConfigError(f"stage {name!r} is already {known.__qualname__}; choose another name")
        cls.role = name
        ROLES[name] = cls
        return cls

    return decorate


def create_role_state_machine(
    role_name: str,
    pipeline: Pipeline,
    trainer: PipelineTrainer,
    use_async_rl: bool = True,
    lane: int = 0,
) -> RoleStateMachine:
    """Return a machine of a registered stage, not wired yet.

    `use_async_rl=False` requests the strictly sequential form and is valid only in a flow that was
    created with `enable_async_rl=False`. Raises ConfigError if the stage is unknown or the two values
    differ.
    """
    if use_async_rl != pipeline.enable_async_rl:
        raise ConfigError(
            f"stage {role_name!r}: use_async_rl={use_async_rl} but the flow has enable_async_rl="
            f"{pipeline.enable_async_rl}; give both the same value"
        )
    try:
        cls = ROLES[role_name]
    except KeyError:
        raise ConfigError(
            f"no stage is called {role_name!r}; registered: {', '.join(sorted(ROLES))}"
        ) from None
    return cls(pipeline=pipeline, trainer=trainer, lane=lane)


def known_roles() -> Sequence[str]:
    """Return the names of all registered stages."""
    return tuple(ROLES)
