# SPDX-License-Identifier: Apache-2.0
"""Who waits on an event loop, for what, since when, and who could end that. `clock.within` keeps it.

    [train waits for the gather of version 3]  ─ holders ─►  [param_update waits for ...]  ─►  ...

Followed from one wait to the next this is a wait-for graph. A holder that does not wait itself, or whose wait
names
nobody, may still go on, and so may all who wait for it; where nobody of a set may, the set is deadlocked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary


class Holders(str):
    """Who holds what is waited for, in words that also know the names of those who can be followed
    further.
    """

    names: tuple[str, ...]

    def __new__(cls, text: str, names: Iterable[str] = ()) -> Holders:
        made = super().__new__(cls, text)
        made.names = tuple(names)
        return made


@dataclass(frozen=True, kw_only=True, eq=False)
class Wait:
    """One wait that is under way."""

    owner: str
    what: str
    since: float
    """Time of the loop, in seconds."""
    timeout_s: float | None
    holder: Callable[[], str] | None = None

    def in_words(self) -> str:
        """That it has lasted for too long."""
        return f"{self.owner} waited {self.timeout_s:g} s for {self.what}"

    def holders(self) -> Holders:
        """Who could end it, as of now."""
        found = "" if self.holder is None else self.holder()
        return found if isinstance(found, Holders) else Holders(found)


class Waits:
    """The waits of one event loop."""

    def __init__(self) -> None:
        self._open: dict[Wait, None] = {}
        self.on_expiry: Callable[[Wait], str] | None = None
        """Called on the loop when the deadline of a wait has passed, before anybody learns of it; says
        what it comes down to.
        """

    @property
    def open(self) -> tuple[Wait, ...]:
        """The oldest first."""
        return tuple(self._open)

    @contextmanager
    def noted(self, wait: Wait) -> Iterator[None]:
        """It is under way inside."""
        self._open[wait] = None
        try:
            yield
        finally:
            del self._open[wait]

    def expired(self, wait: Wait) -> str:
        """Its deadline has passed; returns why."""
        return wait.in_words() if self.on_expiry is None else self.on_expiry(wait)


_of_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, Waits] = WeakKeyDictionary()


def waits_of(loop: asyncio.AbstractEventLoop | None = None) -> Waits:
    """Those of a loop, or of the one that runs. Raises RuntimeError: none runs."""
    loop = loop or asyncio.get_running_loop()
    found = _of_loops.get(loop)
    if found is None:
        found = _of_loops[loop] = Waits()
    return found


def deadlocked(graph: Mapping[str, Iterable[str]]) -> set[str]:
    """Those who can never go on. `graph`: who waits -> those of whom any one could end that; who does not
    wait is not in it.

    A wait that names nobody may end from elsewhere (an engine, a timer), and so may all that follow from it.
    """
    stuck = {name for name, holders in graph.items() if tuple(holders)}
    while free := {name for name in stuck if not stuck.issuperset(graph[name])}:
        stuck -= free
    return stuck


def cycle_in(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """Some deadlocked names, each waiting for the next and the last for the first; none if there is no
    deadlock.
    """
    stuck = deadlocked(graph)
    path: list[str] = sorted(stuck)[:1]
    while path:
        following = min(graph[path[-1]])
        if following in path:
            return path[path.index(following) :]
        path.append(following)
    return []
