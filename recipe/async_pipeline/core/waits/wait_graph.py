# SPDX-License-Identifier: Apache-2.0
"""The waits on an event loop: who waits, for what, since when, and who can end the wait.

    [train waits for the gather of version 3]  ─ holders ─►  [param_update waits for ...]  ─►  ...

`deadline.within` records them. Together they form a wait-for graph. A holder that does not wait, or whose
wait names no holder, can continue, and so can everything that waits for it. A set of owners in which none can
continue is deadlocked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary


class Holders(str):
    """A description of what holds up a wait, with the names of the holders in the pipeline."""

    names: tuple[str, ...]

    def __new__(cls, text: str, names: Iterable[str] = ()) -> Holders:
        made = super().__new__(cls, text)
        made.names = tuple(names)
        return made


@dataclass(kw_only=True, eq=False)
class Wait:
    """One wait that is under way."""

    owner: str
    what: str
    since: float
    """Time of the loop, in seconds."""
    timeout_s: float | None
    holder: Callable[[], str] | None = None
    abandoned: bool = False
    """What it waited for ignored its cancellation."""

    def describe(self) -> str:
        """Describe an expired wait."""
        return f"{self.owner} waited {self.timeout_s:g} s for {self.what}"

    def holders(self) -> Holders:
        """Return who can end the wait at this moment."""
        found = "" if self.holder is None else self.holder()
        return found if isinstance(found, Holders) else Holders(found)


class Waits:
    """The waits of one event loop."""

    def __init__(self) -> None:
        self._open: dict[Wait, None] = {}
        self.on_expiry: Callable[[Wait], str] | None = None
        """Called on the loop when the deadline of a wait passes, before the waiter learns of it.

        Returns the cause.
        """

    @property
    def open(self) -> tuple[Wait, ...]:
        """Open waits, the oldest first."""
        return tuple(self._open)

    @contextmanager
    def noted(self, wait: Wait) -> Iterator[None]:
        """Keep the wait open during the block."""
        self._open[wait] = None
        try:
            yield
        finally:
            del self._open[wait]

    def expired(self, wait: Wait) -> str:
        """Report that the deadline of a wait has passed; returns the cause."""
        return wait.describe() if self.on_expiry is None else self.on_expiry(wait)


_of_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, Waits] = WeakKeyDictionary()


def waits_of(loop: asyncio.AbstractEventLoop | None = None) -> Waits:
    """Return the waits of a loop, by default the running one. Raises RuntimeError if no loop is running."""
    loop = loop or asyncio.get_running_loop()
    found = _of_loops.get(loop)
    if found is None:
        found = _of_loops[loop] = Waits()
    return found


def deadlocked(graph: Mapping[str, Iterable[str]]) -> set[str]:
    """Return the owners that can never continue.

    `graph` maps each waiting owner to the owners any one of which can end its wait; owners that do not
    wait are not in it. A wait that names no holder can be ended from outside (by an engine or a timer),
    and so can every wait that depends on it.
    """
    stuck = {name for name, holders in graph.items() if tuple(holders)}
    while free := {name for name in stuck if not stuck.issuperset(graph[name])}:
        stuck -= free
    return stuck


def cycle_in(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """Return deadlocked owners, each waiting for the next and the last for the first.

    Empty if there is no deadlock.
    """
    stuck = deadlocked(graph)
    path: list[str] = sorted(stuck)[:1]
    while path:
        following = min(graph[path[-1]])
        if following in path:
            return path[path.index(following) :]
        path.append(following)
    return []
