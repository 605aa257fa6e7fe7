# SPDX-License-Identifier: Apache-2.0
"""A trainer that costs virtual time instead of computing. Only for tests of pure scheduling."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from recipe.async_pipeline.core.flow_state import FlowState
from recipe.async_pipeline.core.groups.items import (
    Admission,
    Group,
    Prompt,
    PromptBatch,
    Publication,
    StepBatch,
    Trajectory,
    spans_of,
)
from recipe.async_pipeline.core.groups.recall import Recall
from recipe.async_pipeline.core.groups.untrained_groups import Order
from recipe.async_pipeline.core.lag.degradation import Caution, Change
from recipe.async_pipeline.core.schedule import OldLogpSource
from recipe.async_pipeline.strategies import FullyAsync, NStepAhead, Schedule

CALM = Caution()
ORDERS: Mapping[Order, type[Schedule]] = {"drawn": NStepAhead, "finished": FullyAsync}
ALL_ROLES = ("dataloader", "generate", "rollout", "logp", "ref_logp", "reward", "train", "param_update")
TOKENS = 8
"""Tokens of a response whose tokens may be masked; they are written at equal distances in time."""
WITH_CRITIC = (*ALL_ROLES, "values", "critic")
WITH_TEACHER = (*ALL_ROLES, "teacher")


class SimCheckpoint(NamedTuple):
    """What a simulated trainer has written."""

    flow: FlowState
    drawn: int
    """Prompts that it has drawn."""
    critic: int


def published(version: int, *, replicas: int = 1, failure: str = "") -> Publication:
    """Return the report of an update whose sizes and times do not matter."""
    return Publication(
        version=version,
        num_bytes=8,
        gather_s=0.1,
        transfer_s=0.1,
        load_s=0.1,
        stall_s=0.1,
        busy_s=1e9,
        tensors_proved=1,
        replicas=replicas,
        failure=failure,
    )


class SimTrainer:
    """Answers take `answer_s(step, index)` seconds, stages what `costs` says; `calls` records the order."""

    wait_timeout_s: float | None = 1000.0

    def __init__(
        self,
        *,
        max_lag: int = 0,
        first_step: int = 1,
        steps: int = 6,
        groups: int = 3,
        n: int = 2,
        costs: Mapping[str, float] | None = None,
        answer_s: Callable[[int, int], float] = lambda step, index: 1.0,
        roles: Sequence[str] = ALL_ROLES,
        fail: Mapping[str, BaseException] | None = None,
        sync_every: int = 1,
        filtered: Callable[[str], bool] = lambda uid: False,
        places: Mapping[str, str] | None = None,
        old: OldLogpSource = "trainer",
        order: Order = "drawn",
        refresh: int = 0,
        save_every: int = 0,
        caution: Caution = CALM,
        failing: Callable[[int], bool] = lambda version: False,
        share: Callable[[StepBatch], float | None] = lambda batch: None,
        resume: SimCheckpoint | None = None,
        falls_at: float | None = None,
        disk_is_full: Callable[[float], bool] = lambda now: False,
        **schedule: Any,
    ) -> None:
        """`share`: of a step's effective sample size. `resume`: continues from there. `falls_at`: when the
        last replica is gone for good. `disk_is_full`: whether it refuses a checkpoint at that time.
        `places`: role -> pool, for those not on the training devices. `old`: as `Schedule.old_logp`.
        `schedule`: further settings of the schedule. `filtered(uid)`: is this group? `failing(version)`: is
        a replica fenced for it?
        """
        self.caution, self.failing, self.falls_at = caution, failing, falls_at
        self.share, self.narrowings = share, list[str]()
        self.disk_is_full = disk_is_full
        self.changes: list[Change] = []
        self.facts: Mapping[str, Any] = {}
        self.resumed: FlowState | None = None
        self.checkpoints = list[SimCheckpoint]()
        self._drawn = 0
        if resume is not None:
            self.resumed, self._drawn = resume.flow, resume.drawn
        self.schedule = ORDERS[order](
            batch=groups,
            max_lag=max_lag,
            first_step=first_step if resume is None else resume.flow.step + 1,
            last_step=steps,
            sync_every=sync_every,
            ref_refresh_every=refresh,
            old_logp=old,
            save_every=save_every,
            **schedule,
        )
        self.groups, self.n = groups, n
        self.costs = {
            "draw": 0.0,
            "assemble": 0.0,
            "logp": 0.25,
            "ref_logp": 0.25,
            "advantage": 0.0,
            "update": 1.0,
            "finish": 0.0,
            "gather": 0.125,
            "publish": 0.125,
            "validate": 0.0,
            "pull": 0.0625,
            "save": 0.5,
            "save_samples": 0.125,
            "publish_checkpoint": 1.25,
            "restore": 0.0,
            "values": 0.25,
            "critic": 1.0,
            "teacher": 0.5,
            **(costs or {}),
        }
        self.answer_s = answer_s
        self._roles = roles
        self.places = {"generate": "generate", **(places or {})}
        self._filtered = filtered
        self.discarded: list[str] = []
        self.asked: list[str] = []
        """The groups that the teacher has read."""
        self.cancelled: list[str] = []
        self.fail = dict(fail or {})
        self.served, self.criticised = -1, 0 if resume is None else resume.critic
        self._served_at: deque[tuple[int, float]] = deque(maxlen=16)
        self.finished: list[StepBatch] = []
        self.arenas: deque[int] = deque(maxlen=2)
        self.held: dict[str, int] = {}
        """What the copies of the policy elsewhere hold, by role."""
        self.calls: list[str] = []
        self.trained: list[StepBatch] = []
        self.in_flight = 0
        self.in_flight_max = 0

    def roles(self) -> Sequence[str]:
        return self._roles

    def pools(self) -> Mapping[str, int]:
        return dict.fromkeys(("train", *self.places.values()), 1)

    def pool_of(self, role: str) -> str | None:
        if role in self.places:
            return self.places[role]
        if role in ("values", "critic"):
            return self.places.get("critic", "train") if "critic" in self._roles else None
        return "train" if role in ("logp", "ref_logp", "train", "param_update") else None

    def rejects(self, group: Group) -> Literal["filtered", "failed"] | None:
        return "filtered" if self._filtered(group.uid) else None

    async def _cost(self, name: str, step: int) -> None:
        self.calls.append(f"{name}:{step}")
        if name in self.fail and step >= 2:
            raise self.fail[name]
        await asyncio.sleep(self.costs[name])

    async def draw_prompts(self, admission: Admission) -> PromptBatch:
        await self._cost("draw", admission.step)
        numbers = [divmod(self._drawn + i, self.groups) for i in range(admission.prompts)]
        self._drawn += admission.prompts
        prompts = tuple(_prompt(step + 1, i) for step, i in numbers)
        return PromptBatch(step=admission.step, prompts=prompts, admitted_version=admission.version)

    async def restore_prompts(self, uids: Sequence[str]) -> Sequence[Prompt]:
        await self._cost("restore", self.schedule.first_step)
        return [_prompt(*map(int, uid[1:].split("."))) for uid in uids]

    async def generate_group(self, prompt: Prompt, recall: Recall) -> Group | None:
        return await recall.bound(self.answer(prompt))

    async def answer(self, prompt: Prompt) -> Group:
        """Generate a group; it is cancelled on a recall, and if the run is stopped."""
        first, began = self.served, asyncio.get_running_loop().time()
        self.in_flight += 1
        self.in_flight_max = max(self.in_flight_max, self.in_flight)
        if "generate" in self.fail and prompt.step >= 2:
            raise self.fail["generate"]
        try:
            await asyncio.sleep(self.answer_s(prompt.step, prompt.payload))
        except asyncio.CancelledError:
            self.cancelled.append(prompt.uid)
            raise
        finally:
            self.in_flight -= 1
        spans = self._spans(began, first) if self.schedule.straggler == "mask" else None
        trajectories = tuple(
            Trajectory(
                key=f"{prompt.uid}_{i}_0",
                first_version=first,
                last_version=self.served,
                num_tokens=1 if spans is None else TOKENS,
                spans=None if spans is None else spans_of(spans),
                reward=0.5,
            )
            for i in range(self.n)
        )
        return Group(uid=prompt.uid, step=prompt.step, trajectories=trajectories)

    def _spans(self, began: float, first: int) -> tuple[tuple[int, int], ...]:
        """Return which version wrote which token of a response that began then and has just ended."""
        seconds = asyncio.get_running_loop().time() - began
        spans = [(first, 0)]
        for version, at in self._served_at:
            place = math.ceil((at - began) / seconds * (TOKENS - 1)) if seconds else 0
            if version > first and place > 0:
                spans.append((version, place))
        return tuple(spans)

    async def ask_teacher(self, group: Group) -> Group:
        await self._cost("teacher", group.step)
        self.asked.append(group.uid)
        return replace(group, taught=True)

    async def discard(self, group: Group) -> None:
        self.discarded.append(group.uid)

    async def assemble(self, step: int, groups: Sequence[Group]) -> StepBatch:
        await self._cost("assemble", step)
        return StepBatch(step=step, groups=tuple(sorted(groups, key=lambda g: g.uid)))

    async def _pull(self, role: str, version: int | None) -> None:
        """Load a version out of its arena, which must not be written meanwhile."""
        if version is None or self.held.get(role) == version:
            return
        for _ in range(2):
            assert version in self.arenas, f"{role} needs version {version} of {list(self.arenas)}"
            await asyncio.sleep(self.costs["pull"])
        self.held[role] = version

    async def compute_log_probs(self, batch: StepBatch) -> StepBatch:
        if "logp" in self.places:
            await self._pull("logp", self.schedule.old_policy(batch.step))
        await self._cost("logp", batch.step)
        return batch.with_results(metrics={"logp": batch.step})

    async def compute_ref_log_probs(self, batch: StepBatch) -> StepBatch:
        await self._pull("ref_logp", self.schedule.reference(batch.step))
        await self._cost("ref_logp", batch.step)
        return batch.with_results(metrics={"ref_logp": batch.step})

    async def compute_values(self, batch: StepBatch) -> StepBatch:
        await self._cost("values", batch.step)
        assert self.criticised == batch.step - 1, "valued by the critic of the step before"
        return batch.with_results(metrics={"values": batch.step})

    async def update_critic(self, batch: StepBatch) -> StepBatch:
        await self._cost("critic", batch.step)
        self.criticised += 1
        assert self.criticised == batch.step
        return batch.with_results(metrics={"critic": batch.step})

    async def compute_advantages(self, batch: StepBatch) -> StepBatch:
        await self._cost("advantage", batch.step)
        return batch

    async def update(self, batch: StepBatch) -> StepBatch:
        await self._cost("update", batch.step)
        self.trained.append(batch)
        return batch

    async def finish_step(self, batch: StepBatch, facts: Mapping[str, float]) -> float | None:
        await self._cost("finish", batch.step)
        self.finished.append(batch)
        return self.share(batch)

    async def save(
        self, state: FlowState, *, models_read: Callable[[], object], all_read: Callable[[], object]
    ) -> bool:
        made = SimCheckpoint(state, self._drawn, self.criticised)
        assert len(self.trained) + self.schedule.first_step - 1 == state.step
        await self._cost("save", state.step)
        assert len(self.trained) + self.schedule.first_step - 1 == state.step, (
            "the weights changed while they were saved"
        )
        assert self.criticised == made.critic, "so did the critic"
        models_read()
        await self._cost("save_samples", state.step)
        assert len(self.trained) + self.schedule.first_step - 1 == state.step, "a step freed the samples"
        all_read()
        await self._cost("publish_checkpoint", state.step)
        if self.disk_is_full(asyncio.get_running_loop().time()):
            return False
        self.checkpoints.append(made)
        return True

    async def gather(self, version: int) -> object:
        self.arenas.append(version)
        await self._cost("gather", version)
        return version

    async def publish(self, version: int, snapshot: object) -> Publication:
        assert snapshot == version
        await self._cost("publish", version)
        assert version > self.served, "versions only move forward"
        self.served = version
        self._served_at.append((version, asyncio.get_running_loop().time()))
        return published(version, failure="replica 0: it died" if self.failing(version) else "")

    def narrowed(self, why: str) -> None:
        self.narrowings.append(why)

    def stepped(self, change: Change) -> None:
        self.changes.append(change)

    async def watch(self) -> None:
        if self.falls_at is not None:
            await asyncio.sleep(self.falls_at)
            raise ConnectionError("no replica serves any more")

    async def validate(self, version: int) -> float | None:
        await self._cost("validate", version)
        return self.costs["validate"] or None


def _prompt(step: int, index: int) -> Prompt:
    return Prompt(uid=f"p{step}.{index}", step=step, payload=index)


LAYOUTS = [
    {},
    {"logp": "logp"},
    {"ref_logp": "ref"},
    {"logp": "logp", "ref_logp": "ref"},
    {"logp": "forward", "ref_logp": "forward"},
    {"logp": "forward", "critic": "critic"},
]
