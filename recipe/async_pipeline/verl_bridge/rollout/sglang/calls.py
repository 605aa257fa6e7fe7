# SPDX-License-Identifier: Apache-2.0
"""Calls of this package's methods in SGLang's scheduler, over SGLang's own sockets.

A call travels in the same queue as requests, so the scheduler handles it between two steps, after all
requests that were sent before. Imports neither SGLang nor verl: both processes import this module first.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .... import errors
from ....errors import WeightSyncError


@dataclass(frozen=True)
class SchedulerCall:
    """To the scheduler."""

    number: int
    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class SchedulerFailure:
    """An error of the scheduler, by the name of its class."""

    kind: str
    message: str

    @classmethod
    def of(cls, error: BaseException) -> SchedulerFailure:
        return cls(type(error).__name__, str(error))

    def raised(self) -> Exception:
        """Return the error to raise: one of this package's, or a WeightSyncError that names another."""
        kind = getattr(errors, self.kind, None)
        if isinstance(kind, type) and issubclass(kind, errors.AsyncPipelineError):
            return kind(self.message)
        return WeightSyncError(f"{self.kind}: {self.message}")


@dataclass(frozen=True)
class SchedulerReply:
    """From the scheduler."""

    number: int
    value: Any
    failure: SchedulerFailure | None = None


class SchedulerCalls:
    """The server's side: sends calls and hands each reply to its caller."""

    def __init__(self, send: Callable[[SchedulerCall], object]) -> None:
        """`send` puts a call into the queue at once."""
        self._send = send
        self._numbers = itertools.count()
        self._open: dict[int, asyncio.Future[Any]] = {}

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the scheduler. Has no deadline; a caller that is cancelled leaves the call there.

        Raises the method's error; one that is not of this package as a WeightSyncError.
        """
        number = next(self._numbers)
        reply = self._open[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(SchedulerCall(number, method, arguments))
            return await reply
        finally:
            del self._open[number]

    def take(self, reply: SchedulerReply) -> None:
        """Hand over a reply; one without a caller is dropped, since its caller was cancelled."""
        waiting = self._open.get(reply.number)
        if waiting is None or waiting.done():
            return
        if reply.failure is None:
            waiting.set_result(reply.value)
        else:
            waiting.set_exception(reply.failure.raised())
