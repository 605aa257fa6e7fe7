# SPDX-License-Identifier: Apache-2.0
"""Runs that are killed at every moment and resumed, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from recipe.async_pipeline import AsyncTrainingFlow
from recipe.async_pipeline.core.events import LogRecord
from recipe.async_pipeline.core.flow_state import FlowState
from recipe.async_pipeline.core.groups.ledger import LedgerRecord
from recipe.async_pipeline.core.waits.clock import run_virtual
from recipe.async_pipeline.tools.ledger.audit import Audit, valid
from tests.fakes.trainer import SimCheckpoint, SimTrainer

Records = list[Mapping[str, Any]]
Make = Callable[..., SimTrainer]


class Life:
    """One process: from where it begins to where it is killed, or to its end."""

    def __init__(self, trainer: SimTrainer, killed_at: int | None = None) -> None:
        """`killed_at`: the record, of the ledger or of the event log, after which nothing is written."""
        self.trainer, self._left = trainer, killed_at
        self.ledger: Records = []
        self.checkpoints: Sequence[SimCheckpoint] = ()
        self.alive = True
        self.flow = AsyncTrainingFlow(trainer)
        self.flow.ledger.subscribe(self._record)
        self.flow.log.subscribe(self._count)
        run_virtual(self._main())

    async def _main(self) -> None:
        run = asyncio.create_task(self.flow.run())
        self._killed = asyncio.Event()
        kill = asyncio.create_task(self._killed.wait())
        await asyncio.wait([run, kill], return_when=asyncio.FIRST_COMPLETED)
        kill.cancel()
        if self.alive:
            self.checkpoints = tuple(self.trainer.checkpoints)
            run.result()
        run.cancel()
        await asyncio.wait([run])

    def _record(self, record: LedgerRecord) -> None:
        if self._lives():
            self.ledger.append(record.as_dict())

    def _count(self, record: LogRecord) -> None:
        self._lives()

    def _lives(self) -> bool:
        if self.alive and self._left is not None:
            if self._left == 0:
                self.alive, self.checkpoints = False, tuple(self.trainer.checkpoints)
                self._killed.set()
            self._left -= 1
        return self.alive


def written_and_read(checkpoint: SimCheckpoint) -> SimCheckpoint:
    flow = msgspec.json.decode(msgspec.json.encode(checkpoint.flow), type=FlowState)
    assert flow == checkpoint.flow
    return checkpoint._replace(flow=flow)


def lives(
    make: Make, kills: Iterable[int], lost: int = 0, seen: Callable[[Life], None] = lambda life: None
) -> tuple[Life, Records]:
    """Killed after so many records, each time, then left alone. Returns the last process and the ledger of
    all.

    `seen`: gets every process when it has ended. `lost`: records at the end of the ledger that a kill takes
    along, as far as no checkpoint has seen them.
    """
    ledger: Records = []
    newest: SimCheckpoint | None = None
    for kill in [*kills, None]:
        life = Life(make(resume=newest), kill)
        seen(life)
        if newest is None:
            ledger = []
        ledger += life.ledger
        if life.alive:
            return life, ledger
        if life.checkpoints:
            newest = written_and_read(life.checkpoints[-1])
        while (
            newest
            and lost
            and ledger
            and ledger[-1]["n"] > newest.flow.ledger.number
            and ledger[-1]["kind"] != "resumed"
        ):
            ledger.pop()
            lost -= 1
    raise AssertionError("the last one is not killed")


def steps_of(ledger: Records) -> list[set[str]]:
    return [set(record["uids"]) for record in valid(ledger) if record["kind"] == "trained"]


def check(found: Audit, *, steps: int, groups: int, max_lag: int) -> None:
    assert found.violations == []
    assert (found.status, found.steps, found.in_flight) == ("completed", steps, 0)
    assert found.trained == steps * groups
    assert found.dispatched == found.trained + found.filtered + found.expired + found.failed
    assert found.lag_max <= max_lag
