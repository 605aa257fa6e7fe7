# SPDX-License-Identifier: Apache-2.0
"""Consumers of weights that fail, hang and come back as a script says, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from recipe.async_pipeline.core.groups.items import LoadReport
from recipe.async_pipeline.core.waits.clock import run_virtual
from recipe.async_pipeline.errors import ProofError
from recipe.async_pipeline.weight_sync.fleet.fleet import Fleet, UpdateOutcome
from recipe.async_pipeline.weight_sync.memory.manifest import WeightTicket

LOAD_TIMEOUT_S, RESTART_TIMEOUT_S, GRACE_S = 10.0, 50.0, 1.0
LOAD_S, RESTART_S = 2.0, 20.0
FOREVER_S = 1e9


@dataclass
class Replica:
    """Does what its script says, call after call; then all is well.

    `ok`; `raise`; `hang`; `overtaken`, which is `raise` with an engine that is intact; or seconds. A
    preparation takes no time unless `prepare_s` or `prepares` says so.
    """

    name: str
    log: list[str] = field(default_factory=list)
    prepares: list[str] = field(default_factory=list)
    prepare_s: float = 0.0
    loads: list[str] = field(default_factory=list)
    """Commits."""
    load_s: float = LOAD_S
    restarts: list[str] = field(default_factory=list)
    version: int | None = None
    checks: list[str] = field(default_factory=list)
    working: bool = True
    failed: bool = False
    requests: list[int] = field(default_factory=list)
    """Open requests, poll after poll."""
    prepared: int | None = None

    async def prepare(self, ticket: WeightTicket) -> None:
        version = ticket.version
        assert not self.failed, "a replica that failed a load restarts before the next load"
        assert self.version is None or version > self.version, "never back"
        self.prepared = None
        if self.prepare_s or self.prepares:
            self.log.append(f"{self.name} prepares {version}")
        await self._follow(self.prepares, self.prepare_s)
        self.prepared = version

    async def commit(self, version: int) -> LoadReport:
        assert self.prepared == version, "only what was prepared"
        assert not self.failed and (self.version is None or version > self.version)
        self.log.append(f"{self.name} loads {version}")
        self.failed = "overtaken" not in self.loads[:1]
        await self._follow(self.loads, self.load_s)
        self.failed = False
        self.version, self.prepared = version, None
        self.log.append(f"{self.name} serves {version}")
        return LoadReport(
            transfer_s=0.1, load_s=LOAD_S, commit_s=LOAD_S, stall_s=LOAD_S, prove_s=0.01, tensors_proved=3
        )

    async def leave(self) -> None:
        self.working = False

    async def end(self) -> None:
        assert not self.working
        self.version = self.prepared = None

    async def start(self) -> None:
        await self._follow(self.restarts, RESTART_S)
        self.failed = False

    async def open_requests(self) -> int:
        return self.requests.pop(0) if self.requests else 0

    async def release(self) -> None:
        self.log.append(f"{self.name} is gone")

    async def join(self) -> None:
        assert self.version is not None
        self.working = True

    async def check(self) -> None:
        assert self.working
        await self._follow(self.checks, 0.0)

    async def _follow(self, script: list[str], seconds: float) -> None:
        step = script.pop(0) if script else "ok"
        words = {"hang": FOREVER_S, "ok": seconds, "raise": seconds, "overtaken": seconds}
        seconds = words[step] if step in words else float(step)
        if seconds:
            await asyncio.sleep(seconds)
        if step in ("raise", "overtaken"):
            raise ProofError(f"{self.name}: other values")


def distribute(
    *replicas: Replica,
    say: Callable[[str], None] = lambda line: None,
    max_concurrent_loads: int = 1,
    **more: Any,
) -> Fleet:
    deadlines: dict[str, Any] = {
        "max_concurrent_loads": lambda consumers, commit_s: max_concurrent_loads,
        "load_timeout_s": LOAD_TIMEOUT_S,
        "restart_timeout_s": RESTART_TIMEOUT_S,
        "grace_s": GRACE_S,
    }
    return Fleet(replicas, say, **{**deadlines, **more})


def newcomer(name: str, **more: Any) -> Replica:
    """Return a replica that is not started yet."""
    return Replica(name, working=False, **more)


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run_virtual(scenario())


def publish(fleet: Fleet, version: int) -> Coroutine[Any, Any, UpdateOutcome]:
    return fleet.publish(WeightTicket(version=version, board="b", pid=1, num_bytes=8, gather_s=0.1))


def watched(fleet: Fleet) -> asyncio.Task[None]:
    return asyncio.create_task(fleet.watch())
