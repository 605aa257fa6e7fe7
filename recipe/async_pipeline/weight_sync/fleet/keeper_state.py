# SPDX-License-Identifier: Apache-2.0
"""What the keepers of a run have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from ...core.items import LoadReport
from ...core.wait_queue import Broadcast, Turnstile
from ..memory.manifest import WeightTicket
from .registry import Registry


@dataclass(kw_only=True)
class Shared:
    """What the keepers of a run have in common."""

    registry: Registry
    load_timeout_s: float
    restart_timeout_s: float
    slots: Turnstile
    """Turns to commit while serving."""
    say: Callable[[str], None]
    note: Callable[[str, str, int | None], None]
    changed: Broadcast = field(default_factory=Broadcast)
    """Notified after each change of the registry."""
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once a version was served, so a later failure is not a configuration error."""
    watched: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once consumers are to be checked."""
    ticket: WeightTicket | None = None
    """The newest version."""
    reports: list[LoadReport] = field(default_factory=list)
    """Loads of the newest version."""
    failures: dict[str, str] = field(default_factory=dict)
    """Consumers that failed since the newest version was offered, with the reason."""
    last_error: Exception | None = None

    def now(self) -> float:
        return asyncio.get_running_loop().time()
