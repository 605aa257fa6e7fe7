# SPDX-License-Identifier: Apache-2.0
"""Soak in virtual time: the real pipeline and weight publisher, with stand-ins that fail.

Replicas die, hang and corrupt loads, the judge is slow, raises and hangs, the disk is full, and the whole
run is killed. Hundreds of runs per minute, each from a seed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any, Literal

import pytest

from recipe.async_pipeline.core.flow_state import FlowState
from recipe.async_pipeline.core.groups.items import Group, LoadReport, Prompt, Publication
from recipe.async_pipeline.core.lag.degradation import Caution
from recipe.async_pipeline.lab.event_audit import audit_events
from recipe.async_pipeline.tools.ledger.audit import audit, valid
from recipe.async_pipeline.weight_sync.fleet.fleet import Fleet
from recipe.async_pipeline.weight_sync.memory.manifest import WeightTicket
from tests.fakes.lives import Life, check, lives
from tests.fakes.trainer import SimCheckpoint, SimTrainer, published

PREPARE_S, LOAD_S, RESTART_S, DEADLINE_S = 0.1, 0.1, 30.0, 20.0
FOREVER_S = 1e6


class Replica:
    """A replica that fails at random."""

    def __init__(self, name: str, dice: random.Random, bad: float) -> None:
        self.name, self.up = name, asyncio.Event()
        self.version = self.prepared = -1
        self.up.set()
        self._dice, self._bad = dice, bad
        self._loaded = False

    async def prepare(self, ticket: WeightTicket) -> None:
        await self._work(PREPARE_S, "its memory is full")
        self.prepared = ticket.version

    async def commit(self, version: int) -> LoadReport:
        assert self.prepared == version > self.version, "versions only move forward"
        await self._work(LOAD_S, "its weights are corrupt")
        self.version, self._loaded = version, True
        return LoadReport(
            transfer_s=PREPARE_S, load_s=LOAD_S, commit_s=LOAD_S, stall_s=LOAD_S, busy_s=1.0, tensors_proved=1
        )

    async def check(self) -> None:
        await self._work(0.0, "its engine is dead")

    async def leave(self) -> None:
        self.up.clear()

    async def end(self) -> None:
        self.version = self.prepared = -1

    async def release(self) -> None:
        pass

    async def open_requests(self) -> int:
        return 0

    async def start(self) -> None:
        await self._work(RESTART_S, "it does not start")

    async def join(self) -> None:
        self.up.set()

    async def _work(self, seconds: float, why: str) -> None:
        # The very first load is not hurt: a run that never worked is not restarted.
        dice = self._dice.random() if self._loaded else 1.0
        await asyncio.sleep(FOREVER_S if dice < self._bad / 2 else seconds)
        if dice < self._bad:
            raise ConnectionError(f"{self.name}: {why}")


class Hurt(SimTrainer):
    """A run in which everything that can fail does so at random."""

    def __init__(self, dice: random.Random, **settings: Any) -> None:
        super().__init__(caution=Caution(after=2, clean=3), **settings)
        self.dice = dice
        bad = dice.choice([0.0, 0.02, 0.1])
        self.replicas = [Replica(f"replica {i}", dice, bad) for i in range(dice.choice([1, 2, 3]))]
        self.fleet = Fleet(
            self.replicas,
            lambda line: None,
            load_timeout_s=DEADLINE_S,
            restart_timeout_s=2 * RESTART_S,
            grace_s=1.0,
        )

    async def answer(self, prompt: Prompt) -> Group:
        if self.dice.random() < 0.05:
            await asyncio.sleep(50.0)
        group = await super().answer(prompt)
        while not any(replica.up.is_set() for replica in self.replicas):
            await asyncio.wait(
                [asyncio.create_task(replica.up.wait()) for replica in self.replicas],
                return_when=asyncio.FIRST_COMPLETED,
            )
        if self.dice.random() < 0.1:
            return Group(
                uid=prompt.uid,
                step=prompt.step,
                trajectories=group.trajectories,
                flaw="no_score",
                again=self.dice.random() < 0.7,
            )
        return group

    def rejects(self, group: Group) -> Literal["filtered", "failed"] | None:
        return "failed" if group.flaw else super().rejects(group)

    async def save(self, state: FlowState, **read: Callable[[], object]) -> bool:
        full = self.dice.random() < 0.3 and state.step < self.schedule.last_step
        return False if full else await super().save(state, **read)

    async def publish(self, version: int, snapshot: object) -> Publication:
        ticket = WeightTicket(version=version, board="b", pid=1, num_bytes=8, gather_s=0.1)
        await self.fleet.retire(version - 2)
        outcome = await self.fleet.publish(ticket)
        assert outcome.reports
        self.served = version
        return published(version, replicas=len(outcome.reports), failure="; ".join(outcome.failures.values()))

    async def watch(self) -> None:
        await self.fleet.watch()


def hurt(seed: int) -> None:
    dice = random.Random(seed)
    max_lag = dice.randint(0, 3)
    settings: dict[str, Any] = {
        "max_lag": max_lag,
        "steps": dice.randint(2, 8),
        "groups": dice.randint(1, 4),
        "save_every": dice.randint(1, 3),
        "order": dice.choice(["drawn", "finished"]),
        "straggler": dice.choice(["wait", "regenerate", "drop", "mask"]),
        "filtered": (lambda uid: sum(uid.encode()) % 5 == 0) if dice.random() < 0.3 else (lambda uid: False),
    }

    made: list[Hurt] = []

    def make(resume: SimCheckpoint | None = None) -> SimTrainer:
        made.append(Hurt(dice, resume=resume, **settings))
        return made[-1]

    def look(life: Life) -> None:
        log = [
            {"t": r.t, "role": r.role, "event": r.event, "state": r.state, **r.fields}
            for r in life.flow.log.records
        ]
        assert audit_events(log).violations == [], seed

    kills = [dice.randint(1, 400) for _ in range(dice.randint(0, 3))]
    try:
        last, ledger = lives(make, kills, lost=dice.randint(0, 9), seen=look)
    except (ConnectionError, TimeoutError) as error:
        # Every replica failed three times: that ends a run with an error that names a replica.
        assert not made[-1].fleet.serving, f"seed {seed}: {error}"
        assert "replica " in str(error), f"seed {seed}: {error}"
        return
    check(audit(valid(ledger)), steps=settings["steps"], groups=settings["groups"], max_lag=max_lag)
    assert last.flow.result().steps == settings["steps"]


@pytest.mark.slow
def test_nothing_is_lost_under_random_faults() -> None:
    for seed in range(100):
        hurt(seed)


@pytest.mark.nightly
def test_nothing_is_lost_under_random_faults_over_a_thousand_seeds() -> None:
    for seed in range(100, 1100):
        hurt(seed)


@pytest.mark.slow
def test_most_runs_survive() -> None:
    """Otherwise the tests above would prove little."""

    def survives(seed: int) -> bool:
        dice = random.Random(seed)
        trainer = Hurt(dice, max_lag=1, steps=4)
        life = Life(trainer)
        return life.flow.result().steps == 4

    assert sum(map(survives, range(20))) >= 15
