# SPDX-License-Identifier: Apache-2.0
"""Calls of this package's methods in SGLang's scheduler, over SGLang's own sockets.

A call travels in the same queue as requests, so the scheduler handles it between two steps, after all
requests that were sent before. Imports neither SGLang nor verl: both processes import this module first.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Callable, Sequence
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


# What SGLang has under different names, from 0.5.12 on. Chosen by what is there, not by its version.
#
# Imports nothing of SGLang: the server's process and the scheduler's have imported it.
def sender(manager: Any) -> Callable[[Any], object]:
    """Return the function of a tokenizer manager that puts a message into the scheduler's queue at once."""
    # It encodes messages as both ends have agreed; before, all of them were pickled.
    dispatch: Callable[[Any], object] | None = getattr(manager, "_dispatch_to_scheduler", None)
    return dispatch if dispatch is not None else manager.send_to_scheduler.send_pyobj


def message(content: Any) -> Any:
    """Return a message between server and scheduler in the form that SGLang can send.

    With SGLANG_USE_PICKLE_IPC=0 it sends its own types, and others only as a `PickleWrapper`, which the
    receiver unwraps.
    """
    wrap = getattr(sys.modules.get("sglang.srt.managers.io_struct"), "wrap_as_pickle", None)
    return content if wrap is None else wrap(content)


def ranks(scheduler: Any) -> int:
    """Return the number of ranks of tensor parallelism."""
    return int(scheduler.tp_cpu_group.size())


def middle_chunks(request: Any) -> int:
    """Return how many steps are in flight that read a part of the prompt, but not its end."""
    if hasattr(request, "inflight_middle_chunks"):
        return int(request.inflight_middle_chunks)
    return int(request.is_chunked)


def log_probs(request: Any) -> Sequence[float] | None:
    """Return the log-probs of a request's tokens, or None if they were not requested."""
    values: Sequence[float] | None = getattr(request, "logprob", request).output_token_logprobs_val
    return values
