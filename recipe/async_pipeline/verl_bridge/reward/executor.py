# SPDX-License-Identifier: Apache-2.0
"""Reward functions that may hang, hog or fail: called with a deadline, in processes that can be killed.

A plain function runs in a process of its own (pebble's pool), which is killed when its time is up, so that
neither an
endless loop nor a crash of native code takes the run along, nor does `exit()`. What it has started is killed
with it. Its
memory and CPU time can be limited, too; it leaves no core dump. An `async def` function waits in the caller's
event loop,
for a service as a rule; its await is cancelled, but a loop in it that never awaits cannot be. A function that
scores
many answers at once gets them in micro-batches; if one fails, its answers are tried one by one.

Imports neither verl nor ray: the processes that call the functions import this, and should start fast.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import math
import multiprocessing
import os
import resource
import signal
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, wraps
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from ...errors import ConfigError, RewardError
from ...processes import end_with_parent, gain_no_rights
from ...redaction import without_secrets

PACKAGE, FILE = "pkg://", "file://"
START_S = 60.0
"""What a process of the pool may take to begin, which is to load the function's file."""
BATCH_WAIT_S = 0.02
"""How long the first answer of a micro-batch waits for others."""
LISTS = {
    "data_source": "data_sources",
    "solution_str": "solution_strs",
    "ground_truth": "ground_truths",
    "extra_info": "extra_infos",
}
"""What a function for one answer calls its arguments, and one for many."""


@dataclass(frozen=True)
class Function:
    """Where a reward function is: what verl has under `reward.custom_reward_function`."""

    path: str
    name: str
    kwargs: Mapping[str, Any]

    def load(self) -> Callable[..., Any]:
        """Raises ConfigError: there is no such function."""
        return _load(self.path, self.name)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a call may cost."""

    timeout_s: float
    attempts: int = 2
    concurrency: int = 8
    """Calls at once; for a plain function as many processes, started as they are needed."""
    batch: int | None = None
    """Answers in one call, for a function that takes lists (`LISTS`); None: it takes one."""
    memory_mb: int | None = None
    """Address space of a process; None: as much as the machine has."""
    cpu_s: float | None = None
    """CPU time of a call, of all its threads; None: as much as they use until the time is up."""


class RewardGuard:
    """Scores answers within limits."""

    def __init__(self, function: Function, limits: Limits) -> None:
        self._function, self._limits = function, limits
        self._is_async = inspect.iscoroutinefunction(function.load())
        self._slots = asyncio.Semaphore(limits.concurrency)
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: list[tuple[dict[str, Any], asyncio.Future[Any]]] = []
        self._batches: set[asyncio.Task[None]] = set()
        self._pool: Any = None
        self._begun, self._begins = multiprocessing.Pipe(duplex=False)
        """Each process of the pool says its number as it begins. So few bytes are written whole: no lock
        that it could die with.
        """
        self._groups: set[int] = set()

    async def score(self, **answer: Any) -> Any:
        """What the function returns for an answer: a finite number, or a mapping with one under `score`.

        Raises RewardError, with what the last attempt came to.
        """
        error: RewardError | None = None
        for attempt in range(self._limits.attempts):
            try:
                # What has failed in a batch is tried alone, so that it takes no other down again.
                together = self._limits.batch is not None and attempt == 0
                return checked(await (self._in_batch(answer) if together else self._alone(answer)))
            except RewardError as failed:
                error = failed
        assert error is not None
        raise error

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._end_what_they_started()

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
        except Exception as error:  # noqa: BLE001  each of those who wait gets it
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
                    return await asyncio.wait_for(
                        only_errors(self._function.load())(**arguments), self._limits.timeout_s
                    )
                return await self._in_process(arguments)
            except (TimeoutError, FutureTimeout, asyncio.TimeoutError):  # three classes before Python 3.11
                self._end_what_they_started()
                raise RewardError(
                    f"timeout: {self._function.name} took more than {self._limits.timeout_s:g} s"
                ) from None
            except asyncio.CancelledError:
                raise
            except Exception as error:
                self._end_what_they_started()
                kind = "died" if type(error).__name__ == "ProcessExpired" else "raised"
                text = (
                    str(error)
                    if isinstance(error, RewardError)
                    else _in_words(kind, self._function.name, error)
                )
                raise RewardError(without_secrets(text)[:500]) from error

    def _in_process(self, arguments: dict[str, Any]) -> Awaitable[Any]:
        where = (self._function.path, self._function.name)
        if self._pool is None:
            from pebble import ProcessPool

            # What the function's file imports counts for nobody's time.
            self._pool = ProcessPool(
                self._limits.concurrency,
                initializer=_begin,
                initargs=(*where, self._limits.memory_mb, self._begins),
                context=multiprocessing.get_context("spawn"),
            )
        called = self._pool.schedule(
            _call_here, args=(*where, arguments, self._limits.cpu_s), timeout=self._limits.timeout_s
        )
        # pebble's clock runs from the moment at which a process has begun.
        return asyncio.wait_for(asyncio.wrap_future(called), self._limits.timeout_s + START_S)

    def _end_what_they_started(self) -> None:
        """Kill the process groups of which a process of the pool was the first, and is gone."""
        while self._begun.poll():
            self._groups.add(self._begun.recv())
        for group in list(self._groups):
            try:
                os.kill(group, 0)
            except ProcessLookupError:
                self._groups.discard(group)
                with suppress(ProcessLookupError):  # there is nothing left of it
                    os.killpg(group, signal.SIGKILL)


def only_errors(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function. Raises RewardError in place of what a caller in an event loop would not survive.

    `exit()` would end the loop, and who waits for a thread that raised StopIteration does so for ever.
    """
    name = getattr(function, "__name__", str(function))
    if inspect.iscoroutinefunction(function):

        @wraps(function)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            try:
                return await function(*args, **kwargs)
            except (SystemExit, KeyboardInterrupt) as error:
                raise RewardError(_in_words("raised", name, error)) from error

        return awaited

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, StopIteration):
                raise  # as it is
            raise RewardError(_in_words("raised", name, error)) from error

    return called


def _in_words(kind: str, name: str, error: BaseException) -> str:
    return f"{kind}: {name}: {type(error).__name__}: {error}"


def checked(result: Any) -> Any:
    """The result. Raises RewardError: it has no score, or one that is no finite number."""
    score = result.get("score") if isinstance(result, Mapping) else result
    try:
        number = None if score is None or isinstance(score, str) else float(score)
    except (TypeError, ValueError):
        number = None
    if number is None or not math.isfinite(number):
        raise RewardError(f"invalid: the score must be a finite number, got {score!r}"[:500])
    return result


def _listed(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """The arguments of one call for many answers. What is no list (a router's address) is the same for
    all.
    """
    first = answers[0]
    return {
        LISTS.get(name, name): [a[name] for a in answers] if name in LISTS else value
        for name, value in first.items()
    }


def _one_of(found: Any, index: int, count: int) -> Any:
    if not hasattr(found, "__len__") or isinstance(found, str | Mapping) or len(found) != count:
        raise RewardError(f"invalid: {count} answers must get a list of as many scores, got {found!r}"[:500])
    return found[index]


def _begin(path: str, name: str, memory_mb: int | None, begins: Any) -> None:
    """In a new process of the pool: end with the one that made it, gain no rights, and load the function."""
    end_with_parent()
    os.setpgid(0, 0)
    begins.send(os.getpid())
    gain_no_rights()
    # What it holds in memory is the answers and scores of a run.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _load(path, name)
    if memory_mb is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))


def _call_here(path: str, name: str, arguments: dict[str, Any], cpu_s: float | None) -> Any:
    """In a process of the pool. Past its CPU time the kernel ends it. Raises RewardError: whatever else
    went wrong.
    """
    if cpu_s is not None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        soft = math.ceil(used.ru_utime + used.ru_stime + cpu_s)
        resource.setrlimit(
            resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard)
        )
    try:
        result = _load(path, name)(**arguments)
        ForkingPickler.dumps(result)  # the pool would only say that the process has died
    except BaseException as error:  # noqa: BLE001  `exit()` as well: the pool would hand it on to the one who waits
        raise RewardError(_in_words("raised", name, error)) from None
    return result


@cache
def _load(path: str, name: str) -> Callable[..., Any]:
    """As verl does, by the package or the file. Raises ConfigError."""
    try:
        if path.startswith(PACKAGE):
            module = importlib.import_module(path.removeprefix(PACKAGE).replace("/", "."))
        else:
            file = Path(path.removeprefix(FILE))
            spec = importlib.util.spec_from_file_location(f"reward_function_{file.stem}", file)
            if spec is None or spec.loader is None:
                raise ImportError(f"{file} is no Python file")
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        function: Callable[..., Any] = getattr(module, name)
    except Exception as error:  # whatever the file does when it is read
        raise ConfigError(
            f"reward.custom_reward_function: {name} of {path} cannot be loaded ({error}); correct path and "
            "name"
        ) from error
    return function
