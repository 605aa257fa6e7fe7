# SPDX-License-Identifier: Apache-2.0
"""Actors that Ray starts again when their process, or their node, is gone."""

from __future__ import annotations

from typing import Any

import ray

RESTARTS = 10
"""Of one actor in a run. Ray starts the process again, on another node if need be, and asks it again for what
it had not
answered: as often as that takes, since until Ray knows that a node is lost each question to it fails at
once."""


def lasting(cls: type, restarts: int = RESTARTS) -> LastingArguments:
    """The actor class of `cls`, to be used as `ray.remote(cls)` is. What is asked twice must do no harm."""
    return LastingArguments(ray.remote(max_restarts=restarts, max_task_retries=-1)(cls))


class LastingArguments:
    """An actor class whose constructor's arguments stay where Ray finds them when it starts an actor again.

    Those that Ray puts into its object store by itself are gone once an actor has started.
    """

    def __init__(self, actor_class: Any) -> None:
        self._actor_class = actor_class
        self._kept: list[tuple[Any, ray.ObjectRef[Any]]] = []

    def options(self, **options: Any) -> LastingArguments:
        """Of the actors that are made from what this returns."""
        other = LastingArguments(self._actor_class.options(**options))
        other._kept = self._kept
        return other

    def remote(self, *args: Any) -> Any:
        return self._actor_class.remote(*[self._lasting(arg) for arg in args])

    def _lasting(self, arg: Any) -> ray.ObjectRef[Any]:
        found = next((ref for kept, ref in self._kept if kept is arg), None)
        if found is None:
            found = ray.put(arg)
            self._kept.append((arg, found))
        return found
