# SPDX-License-Identifier: Apache-2.0
"""A stage that works on everything that it has received at once.

    receive ─► gate ─► split ─┬─► process ─► emit ─┐
                              ├─► process ─► emit ─┼─► outputs, in the order in which the parts finish
                              └─► process ─► emit ─┘

One machine tells what all parts are doing together:

    WAITING_INPUT     nothing is in work
    RUNNING           at least one part is being worked on
    WAITING_OUTPUT    all parts are finished, and at least one waits for room in an output channel

The stage does not bound the number of parts in work; the producer of its input does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar

from .channel import Channel
from .stage import RoleStateMachine
from .state_machine import Event, StageState


@dataclass
class _Part:
    """What one task of a stage works on."""

    fields: dict[str, Any]
    """As the event log shows it."""
    since: float
    """Time of the loop, in seconds."""
    working: bool = True
    """False while it waits for room in an output channel."""


_PART: ContextVar[_Part | None] = ContextVar("part", default=None)
"""The part of the running task; None in the tasks that work on no part."""


class ConcurrentStage(RoleStateMachine):
    """Subclasses implement `process` for one part of an item; each part has its own task.

    The lease is held from the first part until nothing is in work; `process` must not release it. A part
    that fails ends the stage, after all others have been cancelled and have ended.
    """

    def __init__(self, **kwargs: Any) -> None:
        self._fields: dict[str, Any] = {}
        super().__init__(**kwargs)
        self._parts: dict[asyncio.Task[None], _Part] = {}
        """Parts in work, the oldest first."""
        self._working = 0
        """Parts in work that do not wait for room."""
        self._receiving = True
        self._closing = False
        self._error: BaseException | None = None
        self._progress: asyncio.Future[None] | None = None

    # What subclasses implement.

    def split(self, item: Any) -> Iterable[Any]:
        """Return the parts of an item; by default it is one part."""
        return (item,)

    awaits: ClassVar[str] = "a part in work to be finished"
    """What the stage waits for while parts are in work."""
    doing: ClassVar[str] = "parts are in work"
    """What follows their number."""

    def describe_work(self) -> str:
        """Return how many parts are being worked on, and since when the oldest is."""
        oldest = next((part for part in self._parts.values() if part.working), None)
        if oldest is None:
            return f"0 {self.doing}"
        name = " ".join(f"{key} {value}" for key, value in oldest.fields.items())
        seconds = asyncio.get_running_loop().time() - oldest.since
        return f"{self._working} {self.doing}, the oldest since {seconds:.1f} s ({name})"

    # What subclasses call.

    async def emit(self, item: Any, *, more: bool = False) -> None:
        """Hand an item to every output, behind the parts that finished before.

        With `more=True` the part is worked on afterwards. Waits for: room in each output channel. Raises
        ChannelClosed if the run is being stopped.
        """
        self._pause(self._item)
        for channel in self.outputs:
            await self._wait(channel.send(item), f"room in {channel.name}", self._consumers(channel))
        if more:
            self._part.working = True
            self._working += 1
            self._resume(self._item)

    @property
    def item(self) -> Mapping[str, Any]:
        """The number of parts in work; empty if there are none."""
        return {"parts": len(self._parts)} if self._parts else {}

    # An event has the fields of the part whose task logs it.

    @property
    def _item(self) -> dict[str, Any]:
        part = _PART.get()
        return self._fields if part is None else part.fields

    @_item.setter
    def _item(self, fields: dict[str, Any]) -> None:
        part = _PART.get()
        if part is None:
            self._fields = fields
        else:
            part.fields = fields

    @property
    def _part(self) -> _Part:
        part = _PART.get()
        assert part is not None, "only `process` may call this"
        return part

    # The loop.

    @property
    def _stopping(self) -> bool:
        return self._closing or super()._stopping

    async def _consume(self) -> None:
        receiving = asyncio.create_task(self._receive_all(), name=f"{self.name}:receive")
        receiving.add_done_callback(self._ended)
        try:
            while (self._receiving or self._parts) and self._error is None:
                self._progress = asyncio.get_running_loop().create_future()
                await self._wait(self._progress, *self._awaited())
        finally:
            self._closing = True
            tasks = (receiving, *self._parts)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._closing = False
        if self._error is not None:
            raise self._error

    async def _receive_all(self) -> None:
        with self._no_stray_cancellation():
            await super()._consume()
        self._receiving = False

    async def _receive_from(self, channel: Channel[Any]) -> Any:
        # `_consume` has the deadline: it waits for an item only while nothing is in work.
        return await channel.receive()

    async def _work(self, item: Any) -> None:
        """Begin to work on an item."""
        fields = self._fields = self.describe_item(item)
        await self.gate(item)
        if self.state is StageState.WAITING_INPUT:
            self.machine.fire(Event.ITEM, **fields)
            self._lease = await self._acquire()
            self.machine.fire(Event.LEASE, **fields)
        else:
            self._resume(fields)

        for part in self.split(item):
            described = {**self.describe_item(part), **fields}
            made = _Part(described, asyncio.get_running_loop().time())
            name = ":".join((self.name, str(described.get("key", ""))))
            task = asyncio.create_task(self._work_on(part, made), name=name)
            self._parts[task] = made
            self._working += 1
            task.add_done_callback(self._ended)
        self._settle(fields)
        self._advance()

    async def _work_on(self, part: Any, made: _Part) -> None:
        _PART.set(made)
        try:
            await self.process(part)
        except asyncio.CancelledError:
            with self._no_stray_cancellation():
                raise
        _PART.set(None)

        task = asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"
        del self._parts[task]
        if made.working:
            self._working -= 1
            self._advance()
        if not self._working:
            self._settle({key: value for key, value in made.fields.items() if key == "step"})

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Wake `_consume` when one of its tasks has ended."""
        if not self._closing:
            self._parts.pop(task, None)
            self._error = self._error or task.exception()
            if self._error is not None or not (self._receiving or self._parts):
                self._advance()

    # Moves of the machine.

    def _pause(self, fields: dict[str, Any]) -> None:
        """Note that the part of the running task waits for room."""
        self._part.working = False
        self._working -= 1
        self.machine.fire(Event.OUTPUT, **fields)
        if self._working:
            self.machine.fire(Event.RESUME, **fields)
        self._advance()

    def _resume(self, fields: dict[str, Any]) -> None:
        if self.state is StageState.WAITING_OUTPUT:
            self.machine.fire(Event.RESUME, **fields)

    def _settle(self, fields: dict[str, Any]) -> None:
        """Move on if nothing is being worked on any more."""
        if self._working:
            return
        if self._parts and self.state is StageState.RUNNING:
            self.machine.fire(Event.OUTPUT, **fields)
        elif not self._parts:
            self._fields = fields
            self.release()
            self.machine.fire(Event.FINISH, **fields)
            self._fields = {}

    def _advance(self) -> None:
        """Begin the deadline of `_consume` again."""
        if self._progress is not None and not self._progress.done():
            self._progress.set_result(None)

    def _awaited(self) -> tuple[str, Callable[[], str]]:
        if self._working:
            return self.awaits, self.describe_work
        channels = self.inputs
        return f"an item from {', '.join(channel.name for channel in channels)}", self._producers(*channels)
