# SPDX-License-Identifier: Apache-2.0
"""Actors that Ray restarts after their process or node has died."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray

from ..trainer.reporting.terminal import say

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
