# SPDX-License-Identifier: Apache-2.0
"""Call reward functions that may hang, use too much memory or CPU, or fail, with a deadline.

A plain function runs in a separate process (a pebble pool), which is killed at the deadline together with the
processes that it started. An endless loop, a crash of native code or `exit()` therefore cannot end the run.
Memory and CPU time of the process can be limited, and it leaves no core dump. An `async def` function,
usually a client of a service, runs in the caller's event loop; its await is cancelled at the deadline, but a
loop without await cannot be. A function that scores many responses gets micro-batches; if a batch fails, its
responses are scored one by one.

This module imports neither verl nor ray, because the processes of the pool import it and should start fast.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import multiprocessing
import os
import resource
import signal
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial, wraps
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from ...core.groups.scores import Score
from ...core.waits.deadline import ABANDONED, GRACE_S, within
from ...core.waits.threads import awaited_here
from ...errors import ConfigError, RewardError, WaitTimeout
from ...processes import end_with_parent, gain_no_rights
from ...redaction import without_secrets
from ..process.user_modules import FILE, PACKAGE, module_of
from .plain_results import plain_result

START_S = 60.0
"""Time limit for the start of a process, which loads the function's file."""
BATCH_WAIT_S = 0.02
"""Time that the first response of a micro-batch waits for others."""
LISTS = {
    "data_source": "data_sources",
    "solution_str": "solution_strs",
    "solution_image": "solution_images",
    "ground_truth": "ground_truths",
    "extra_info": "extra_infos",
}
"""Argument names of a function for one response to the names of a function for many."""


@dataclass(frozen=True)
class FunctionLocation:
    """The location of a reward function, as in verl's `reward.custom_reward_function`."""

    path: str
    name: str
    kwargs: Mapping[str, Any]

    def load(self) -> Callable[..., Any]:
        """Return the function. Raises ConfigError if it cannot be loaded."""
        return _load(self.path, self.name)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a call."""

    timeout_s: float
    attempts: int = 2
    concurrency: int = 8
    """Concurrent calls; for a plain function also the number of processes, which start on demand."""
    batch: int | None = None
    """Responses per call, for a function that takes lists (`LISTS`); None for a function of one response."""
    memory_mb: int | None = None
    """Address space of a process in MiB; None for no limit."""


class RewardGuard:
    """Scores responses within limits."""

    def __init__(self, function: FunctionLocation, limits: Limits) -> None:
        self._function, self._limits = function, limits
        self._is_async = inspect.iscoroutinefunction(function.load())
        self._slots = asyncio.Semaphore(limits.concurrency)
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: list[tuple[dict[str, Any], asyncio.Future[Any]]] = []
        self._batches: set[asyncio.Task[None]] = set()
        self._pool: Any = None
        self._begun, self._begins = multiprocessing.Pipe(duplex=False)
        """Each process of the pool sends its pid when it starts.

        A write of a few bytes is atomic, so there is no lock that a process could hold when it dies.
        """
        self._groups: set[int] = set()

    async def score(self, **answer: Any) -> Any:
        """Return the function's result: a finite number, or a mapping with one under `score`.

        Raises RewardError with the error of the last attempt.
        """
        error: RewardError | None = None
        for attempt in range(self._limits.attempts):
            try:
                # Retry a response of a failed batch alone, so that it cannot fail others again.
                batched = self._limits.batch is not None and attempt == 0
                return checked(await (self._in_batch(answer) if batched else self._alone(answer)))
            except RewardError as failed:
                error = failed
        assert error is not None
        raise error

    def close(self) -> None:
        """End the processes of the pool and all that they started."""
        if self._pool is not None:
            _end(self._pool)
            self._kill_orphans()

    async def _alone(self, answer: dict[str, Any]) -> Any:
        if self._limits.batch is None:
            return await self._call(answer)
        return _one_of(await self._call(_listed([answer])), 0, 1)

    async def _in_batch(self, answer: dict[str, Any]) -> Any:
        scored: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((answer, scored))
        if len(self._waiting) == 1:
            self._timer = asyncio.get_running_loop().call_later(BATCH_WAIT_S, self._send)
        if len(self._waiting) == self._limits.batch:
            self._send()
        return await scored

    def _send(self) -> None:
        batch, self._waiting = self._waiting, []
        assert self._timer is not None
        self._timer.cancel()
        task = asyncio.create_task(self._run(batch), name="rewards")
        self._batches.add(task)
        task.add_done_callback(self._batches.discard)

    async def _run(self, batch: list[tuple[dict[str, Any], asyncio.Future[Any]]]) -> None:
        try:
            found = await self._call(_listed([answer for answer, _ in batch]))
            results = [_one_of(found, i, len(batch)) for i in range(len(batch))]
        except Exception as error:  # noqa: BLE001  every waiting caller receives it
            for _, scored in batch:
                if not scored.done():
                    scored.set_exception(error)
            return

        for (_, scored), result in zip(batch, results, strict=True):
            if not scored.done():
                scored.set_result(result)

    async def _call(self, arguments: dict[str, Any]) -> Any:
        async with self._slots:
            try:
                arguments = {**arguments, **self._function.kwargs}
                if self._is_async:
                    return await self._here(arguments)
                return await self._in_process(arguments)
            except (TimeoutError, FutureTimeout, asyncio.TimeoutError):  # distinct classes before Python 3.11
                self._kill_orphans()
                raise RewardError(
                    f"timeout: {self._function.name} took more than {self._limits.timeout_s:g} s"
                ) from None
            except asyncio.CancelledError:
                raise
            except Exception as error:
                self._kill_orphans()
                kind = "died" if type(error).__name__ == "ProcessExpired" else "raised"
                text = (
                    str(error)
                    if isinstance(error, RewardError)
                    else _described(kind, self._function.name, error)
                )
                raise RewardError(without_secrets(text)[:500]) from error

    async def _here(self, arguments: dict[str, Any]) -> Any:
        """Call an async function in the event loop. Raises RewardError at the deadline."""
        name, timeout_s = self._function.name, self._limits.timeout_s

        async def call() -> Any:
            try:
                return await only_errors(self._function.load())(**arguments)
            except (TimeoutError, asyncio.TimeoutError) as error:
                # Its own is not the one of the deadline.
                raise RewardError(_described("raised", name, error)) from error

        try:
            return await within(call(), timeout_s, owner="a reward worker", what=name, grace_s=GRACE_S)
        except WaitTimeout as error:
            ignored = f"; {ABANDONED}" if error.abandoned else ""
            raise RewardError(f"timeout: {name} took more than {timeout_s:g} s{ignored}") from None

    def _in_process(self, arguments: dict[str, Any]) -> Awaitable[Any]:
        try:
            called = self._scheduled(arguments)
        except RuntimeError:
            # A thread of the pool has ended, and it takes no call any more. To end its processes blocks.
            threading.Thread(target=_end, args=(self._pool,), daemon=True).start()
            self._pool = None
            called = self._scheduled(arguments)
        # pebble's timeout counts from the start of the call in a process.
        return asyncio.wait_for(asyncio.wrap_future(called), self._limits.timeout_s + START_S)

    def _scheduled(self, arguments: dict[str, Any]) -> Any:
        """Have a process of the pool call the function. Raises RuntimeError if the pool is broken."""
        where = (self._function.path, self._function.name)
        if self._pool is None:
            from pebble import ProcessPool

            # The process loads the function at its start, so imports do not count against a call's deadline.
            self._pool = ProcessPool(
                self._limits.concurrency,
                initializer=_begin,
                initargs=(*where, self._limits.memory_mb, self._begins),
                context=multiprocessing.get_context("spawn"),
            )
        return self._pool.schedule(_call_here, args=(*where, arguments), timeout=self._limits.timeout_s)

    def _kill_orphans(self) -> None:
        """Kill the process groups whose leader, a process of the pool, has ended."""
        while self._begun.poll():
            self._groups.add(self._begun.recv())
        for group in list(self._groups):
            try:
                os.kill(group, 0)
            except ProcessLookupError:
                self._groups.discard(group)
                with suppress(ProcessLookupError):  # the group is empty
                    os.killpg(group, signal.SIGKILL)


def _end(pool: Any) -> None:
    pool.stop()
    pool.join()


def only_errors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that it raises RewardError in place of exceptions that break an event loop.

    SystemExit would end the loop, and a caller that awaits a thread would wait forever after StopIteration.
    """
    name = _name_of(function)
    if inspect.iscoroutinefunction(function):

        @wraps(function)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            try:
                return await function(*args, **kwargs)
            except (SystemExit, KeyboardInterrupt) as error:
                raise RewardError(_described("raised", name, error)) from error

        return awaited

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return awaited_here(function(*args, **kwargs))
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, StopIteration):
                raise
            raise RewardError(_described("raised", name, error)) from error

    return called


def _name_of(function: Callable[..., Any]) -> str:
    """Return the name of the user's function, which verl gives to a `partial` with its keywords."""
    while isinstance(function, partial):
        function = next((argument for argument in function.args if callable(argument)), function.func)
    return getattr(function, "__name__", type(function).__name__)


def _described(kind: str, name: str, error: BaseException) -> str:
    return f"{kind}: {name}: {type(error).__name__}: {error}"


def checked(result: Any) -> Any:
    """Return the result, its score as a float. Raises RewardError if that is no finite number."""
    score = result.get("score") if isinstance(result, Mapping) else result
    number = Score.of(score).number()
    return {**result, "score": number} if isinstance(result, Mapping) else number


def _listed(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the arguments of one call for many responses; arguments outside of LISTS are equal for all."""
    first = answers[0]
    return {
        LISTS.get(name, name): [a[name] for a in answers] if name in LISTS else value
        for name, value in first.items()
    }


def _one_of(found: Any, index: int, count: int) -> Any:
    if not hasattr(found, "__len__") or isinstance(found, str | Mapping) or len(found) != count:
        raise RewardError(f"invalid: {count} responses require a list of {count} scores, got {found!r}"[:500])
    return found[index]


def _begin(path: str, name: str, memory_mb: int | None, begins: Any) -> None:
    """Set up a new process of the pool: tie it to its parent, limit its rights and load the function."""
    end_with_parent()
    os.setpgid(0, 0)
    begins.send(os.getpid())
    gain_no_rights()
    # A core dump would contain the responses and scores of the run.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _load(path, name)
    if memory_mb is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))


def _call_here(path: str, name: str, arguments: dict[str, Any]) -> Any:
    """Call the function in a process of the pool. Raises RewardError for every exception of the function."""
    try:
        result = plain_result(awaited_here(_load(path, name)(**arguments)))
        ForkingPickler.dumps(result)  # the pool would only report that the process died
    except BaseException as error:  # noqa: BLE001  also SystemExit, which the pool would raise in the caller
        raise RewardError(_described("raised", name, error)) from error
    return result


@cache
def _load(path: str, name: str) -> Callable[..., Any]:
    """Load a function from a package or a file, as verl does. Raises ConfigError if that fails."""
    try:
        if path.startswith(PACKAGE):
            module = importlib.import_module(path.removeprefix(PACKAGE).replace("/", "."))
        else:
            module = module_of(Path(path.removeprefix(FILE)))

        function: Callable[..., Any] = getattr(module, name)
    except Exception as error:  # the file may raise any exception
        raise ConfigError(
            f"reward.custom_reward_function: {name} of {path} cannot be loaded ({error}); correct path and "
            "name"
        ) from error
    return function
