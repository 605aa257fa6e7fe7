# SPDX-License-Identifier: Apache-2.0
"""Blocking waits in threads, with a deadline and an error that names the owner; actors that Ray restarts.

On an event loop, use `core.waits.deadline.within`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from typing import Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayTaskError

from ...core.waits.deadline import within
from ...errors import WaitTimeout
from ..trainer.reporting.terminal import say

T = TypeVar("T")
ASK_S = 60.0
"""Timeout of a request that an actor serves from memory, normally in milliseconds."""


def got(refs: Any, timeout_s: float | None, *, owner: str, what: str) -> Any:
    """Return the result of `ray.get`. Raises WaitTimeout after `timeout_s`, if any, or the actor's error."""
    try:
        return ray.get(refs, timeout=timeout_s)
    except GetTimeoutError:
        raise WaitTimeout(f"{owner} waited {timeout_s:g} s for {what}") from None


def result_of(future: Future[T], timeout_s: float, *, owner: str, what: str) -> T:
    """Return the result of a future. Raises WaitTimeout after `timeout_s`, and any error of its work."""
    try:
        return future.result(timeout_s)
    except FutureTimeout:
        if future.done():
            # The work itself raised a TimeoutError.
            raise
        raise WaitTimeout(f"{owner} waited {timeout_s:g} s for {what}") from None


def cause_of(error: BaseException) -> BaseException:
    """Return the error that was raised in the actor's process, or `error` if it was raised in this one."""
    return error.cause if isinstance(error, RayTaskError) else error


RESTARTS = 10
"""Restarts of one actor in a run, on another node if needed.

Retries of calls are not limited: until Ray notices that a node is lost, every attempt fails immediately.
"""


def restartable(
    cls: type,
    restarts: int = RESTARTS,
    *,
    groups: Mapping[str, int] | None = None,
    max_concurrency: int | None = None,
) -> RestartableActorClass:
    """Return an actor class for `cls`, used like `ray.remote(cls)`, with these concurrency groups.

    `max_concurrency` is the number of calls that run at once; None is Ray's default.

    Methods must be idempotent: Ray retries them.
    """
    options: dict[str, Any] = {} if max_concurrency is None else {"max_concurrency": max_concurrency}
    actor = ray.remote(
        max_restarts=restarts, max_task_retries=-1, concurrency_groups=dict(groups or {}), **options
    )
    return RestartableActorClass(actor(cls))


def say_if_restarted() -> None:
    """Print a line if this actor's process replaces one that has ended."""
    if not ray.is_initialized():  # in a test without Ray, which asking for the context would start
        return
    context = ray.get_runtime_context()
    if context.worker.mode == ray.WORKER_MODE and context.was_current_actor_reconstructed:
        name = context.get_actor_name() or "a worker"
        say(f"{name} was started again, since its process or node had ended; its calls are repeated")


class RestartableActorClass:
    """An actor class that keeps its constructor arguments in the object store for restarts.

    Ray releases the arguments that it stores itself as soon as an actor has started.
    """

    def __init__(self, actor_class: Any) -> None:
        self._actor_class = actor_class
        self._kept: list[tuple[Any, ray.ObjectRef[Any]]] = []

    def options(self, **options: Any) -> RestartableActorClass:
        """Return a copy of this class with Ray options, as `ActorClass.options` does."""
        other = RestartableActorClass(self._actor_class.options(**options))
        other._kept = self._kept
        return other

    def remote(self, *args: Any) -> Any:
        """Start an actor, as `ActorClass.remote` does."""
        return self._actor_class.remote(*[self._stored(arg) for arg in args])

    def _stored(self, arg: Any) -> ray.ObjectRef[Any]:
        """Return a reference to `arg`; the same object is stored once."""
        found = next((ref for kept, ref in self._kept if kept is arg), None)
        if found is None:
            found = ray.put(arg)
            self._kept.append((arg, found))
        return found


CALL_THREADS = 16
"""Concurrent blocking calls: one per stage, one each of validation and report, three of a checkpoint."""


class BlockingCalls:
    """Runs calls in the threads of a run, with a deadline if the event loop waits for them."""

    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(CALL_THREADS, thread_name_prefix="verl-call")

    async def __call__(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call `function` in a thread and return its result.

        Raises WaitTimeout if it does not return in time, which abandons its thread; else its error.
        """
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        called = loop.run_in_executor(self._threads, partial(function, *args, **kwargs))
        name = getattr(function, "__name__", type(function).__name__)
        return await within(called, self.timeout_s, owner=task.get_name(), what=f"the call {name} to return")

    async def without_deadline(self, function: Callable[..., T], *args: Any) -> T:
        """Call `function` in a thread and return its result. The caller bounds the wait."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(function, *args))

    def submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """Start a call that nothing on the event loop waits for."""
        return self._threads.submit(function, *args)

    def close(self) -> None:
        """Start no more calls. Does not wait for running calls: a thread may be stuck."""
        self._threads.shutdown(wait=False, cancel_futures=True)
