# SPDX-License-Identifier: Apache-2.0
"""A trainer whose work costs virtual time, driven by `AsyncTrainingFlow` in place of verl's.

It follows the same schedule as a real run with the same settings.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Literal

from ....config.derived.scheduling import proximal_policy, schedule_of
from ....config.knobs.schema import AsyncPipelineConfig
from ....config.knobs.weight_sync import concurrent_loads
from ....config.placement import TEACHER, Placement, Pool
from ....core.flow_state import FlowState
from ....core.graph import GRAPH
from ....core.groups.items import (
    Admission,
    Group,
    Prompt,
    PromptBatch,
    Publication,
    StepBatch,
    Trajectory,
    plain,
)
from ....core.groups.recall import Recall
from ....core.lag.degradation import Caution, Change
from ....core.schedule import Schedule
from ..profile import NOTHING, Profile, Stage
from .draws import Draws, GroupCost
from .replica import Replica
from .replica_pool import ReplicaPool


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The run to simulate."""

    profile: Profile
    placement: Placement
    """Placement of `profile.roles()`.

    If `generate` is on the training devices, both take turns as in a synchronous trainer.
    """
    knobs: AsyncPipelineConfig
    groups: int
    """Groups per step."""
    steps: int
    seed: int = 1

    @property
    def pools(self) -> Sequence[Pool]:
        """The pools of the placement, and the teacher's."""
        teacher, pools = self.profile.teacher, self.placement.pools
        if teacher is None or not teacher.devices:
            return pools
        return (*pools, Pool(TEACHER, (TEACHER,), (teacher.devices,)))

    @property
    def shared(self) -> bool:
        """Whether training and generation share devices."""
        return self.placement.own_pool_of("generate") is None

    @property
    def replicas(self) -> int:
        """Number of whole replicas on the devices of `generate`."""
        return self.devices_of("generate") // self.profile.devices_per_replica

    @property
    def loads_at_once(self) -> int:
        """Replicas that load at the same time; all of them if training and generation take turns."""
        sync = self.profile.sync
        return (
            self.replicas if self.shared else concurrent_loads(sync.loads_at_once, self.replicas, sync.turn_s)
        )

    @property
    def old_logp(self) -> str:
        """One of `core.schedule.OldLogpSource`."""
        if self.knobs.training.old_logp == "update":
            return "update"
        absent = self.profile.stages.logp is None
        return proximal_policy(self.knobs, self.placement, bypass=absent, reader="a profile with its seconds")

    @property
    def schedule(self) -> Schedule:
        """The schedule that a real run with these knobs follows."""
        validation = self.profile.validation

        return schedule_of(
            self.knobs,
            batch=self.groups,
            last_step=self.steps,
            old_logp=self.old_logp,
            validate_every=0 if validation is None else validation.every,
        )

    def devices_of(self, role: str) -> int:
        """Return the devices of a role, or 0 if it needs none."""
        pool = self.placement.pool_of({"param_update": "train", "values": "critic"}.get(role, role))
        return 0 if pool is None else pool.devices


class SimulatedTrainer:
    """A `core.trainer_protocol.PipelineTrainer` that spends virtual time."""

    resumed: FlowState | None = None
    caution = Caution()
    facts: Mapping[str, Any] = {}
    wait_timeout_s: float | None = None
    """None: a simulation that hangs ends without a timeout, since no timer is left."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.profile = setting, setting.profile
        self.schedule = setting.schedule
        self._draws = Draws(setting.profile, setting.seed)
        self._numbers = count()
        self._random = random.Random(setting.seed)
        self._pool: ReplicaPool | None = None
        self._weights, self._reading = asyncio.Lock(), asyncio.Lock()
        self._newest = -1
        self._held: dict[str, int] = {}
        """Versions held by forward-only models on other devices, by role."""
        self._failures: set[asyncio.Task[None]] = set()

    @property
    def pool(self) -> ReplicaPool:
        """The engines, created at the first use."""
        if self._pool is None:
            profile = self.profile
            self._pool = ReplicaPool(
                self.setting.replicas, profile.decode, profile.answers.observation_tokens
            )

            mtbf = profile.failures.replica_mtbf_s
            for replica in self._pool.replicas if mtbf else ():
                task = asyncio.create_task(
                    self._fail_at_random(replica, mtbf or 0.0), name=f"failures:{replica.index}"
                )
                self._failures.add(task)
        return self._pool

    @property
    def events(self) -> int:
        """Events of the engines so far."""
        return self._pool.events if self._pool is not None else 0

    def end(self) -> None:
        """Prepare for a cancellation of the run: unfinished responses are not given up one by one."""
        if self._pool is not None:
            self._pool.end()

    # Facts and decisions.

    def roles(self) -> Sequence[str]:
        there = {
            "teacher": self.profile.teacher,
            "logp": None if self.setting.old_logp == "update" else NOTHING,
            "ref_logp": self.profile.stages.ref_logp,
            "values": self.profile.stages.values,
            "critic": self.profile.stages.critic,
        }
        return [role for role in GRAPH if role not in there or there[role] is not None]

    def pools(self) -> Mapping[str, int]:
        return {pool.name: pool.devices for pool in self.setting.pools}

    def pool_of(self, role: str) -> str | None:
        placed = {"param_update": "train", "values": "critic"}.get(role, role)
        return next((pool.name for pool in self.setting.pools if placed in pool.roles), None)

    def rejects(self, group: Group) -> Literal["filtered", "failed"] | None:
        return "failed" if group.flaw else None

    # Work.

    async def draw_prompts(self, admission: Admission) -> PromptBatch:
        await self._stage(self.profile.stages.draw)
        prompts = []
        for _ in range(admission.prompts):
            number = next(self._numbers)
            prompts.append(Prompt(uid=str(number), step=admission.step, payload=self._draws.group(number)))
        return PromptBatch(step=admission.step, prompts=tuple(prompts), admitted_version=admission.version)

    async def restore_prompts(self, uids: Sequence[str]) -> Sequence[Prompt]:
        """Not implemented: a simulation always starts at step 1."""
        raise NotImplementedError

    async def save(
        self, state: FlowState, *, models_read: Callable[[], object], all_read: Callable[[], object]
    ) -> bool:
        """Not implemented: the cost of checkpoints is not simulated."""
        raise NotImplementedError

    def narrowed(self, why: str) -> None:
        """Do nothing: the effective sample size is not simulated."""

    def stepped(self, change: Change) -> None:
        """Do nothing: weight updates do not fail here, so asynchrony is never reduced."""

    async def generate_group(self, prompt: Prompt, recall: Recall) -> Group | None:
        costs: GroupCost = prompt.payload
        served = await recall.bound(self.pool.generate(costs.answers))
        if served is None:
            return None
        trajectories = tuple(
            Trajectory(
                key=f"{prompt.uid}_{i}",
                first_version=versions.first_version,
                last_version=versions.last_version,
                num_tokens=cost.tokens,
                spans=plain(versions.spans),
            )
            for i, (cost, versions) in enumerate(zip(costs.answers, served, strict=True))
        )

        flaw = "fails with the profile's probability" if costs.fails else ""
        return Group(uid=prompt.uid, step=prompt.step, trajectories=trajectories, flaw=flaw)

    async def ask_teacher(self, group: Group) -> Group:
        teacher = self.profile.teacher
        assert teacher is not None, "the run has no stage teacher"
        tokens = sum(one.num_tokens for one in group.trajectories)
        async with self._reading:
            await asyncio.sleep(teacher.read_s(tokens))
        await asyncio.sleep(teacher.group_s)
        return replace(group, taught=True)

    async def discard(self, group: Group) -> None:
        """Do nothing: there is nothing to free."""

    async def assemble(self, step: int, groups: Sequence[Group]) -> StepBatch:
        await self._stage(self.profile.stages.assemble)
        tokens = sum(t.num_tokens for group in groups for t in group.trajectories)
        return StepBatch(step=step, groups=tuple(groups), payload=tokens)

    async def compute_log_probs(self, batch: StepBatch) -> StepBatch:
        version = self.schedule.old_policy(batch.step)
        if version is None:
            return batch
        if self.setting.placement.own_pool_of("logp") is not None:
            await self._pull("logp", version)
        return await self._on(batch, "logp", self.profile.stages.logp)

    async def compute_ref_log_probs(self, batch: StepBatch) -> StepBatch:
        version = self.schedule.reference(batch.step)
        if version is not None:
            await self._pull("ref_logp", version)
        return await self._on(batch, "ref_logp", self.profile.stages.ref_logp)

    async def compute_values(self, batch: StepBatch) -> StepBatch:
        return await self._on(batch, "values", self.profile.stages.values)

    async def compute_advantages(self, batch: StepBatch) -> StepBatch:
        return await self._on(batch, "reward", self.profile.stages.advantage)

    async def update(self, batch: StepBatch) -> StepBatch:
        if self.setting.shared:
            await asyncio.sleep(self.profile.sync.switch_s)
        return await self._on(batch, "train", self.profile.stages.update)

    async def update_critic(self, batch: StepBatch) -> StepBatch:
        return await self._on(batch, "critic", self.profile.stages.critic)

    async def finish_step(self, batch: StepBatch, facts: Mapping[str, float]) -> None:
        await self._stage(self.profile.stages.finish, float(batch.payload))

    async def gather(self, version: int) -> object:
        await self._stage(self.profile.stages.gather, 0.0, self.setting.devices_of("train"))
        return version

    async def publish(self, version: int, snapshot: object) -> Publication:
        """Update the replicas: all prepare at once, `loads_at_once` commit at a time.

        A failed one is updated when it is back.
        """
        async with self._weights:
            self._newest = version
            waiting = iter([replica for replica in self.pool.replicas if replica.is_up])
            await asyncio.sleep(self.profile.sync.prepare_s)

            async def lane() -> float:
                return sum([await self._commit(replica, version) for replica in waiting])

            open_s = sum(await asyncio.gather(*(lane() for _ in range(self.setting.loads_at_once))))
        return self._publication(version, open_s)

    async def watch(self) -> None:
        """Do nothing: failed replicas come back in `_fail_at_random`."""

    async def validate(self, version: int) -> float | None:
        validation = self.profile.validation
        if validation is None or not self.schedule.validates(version):
            return None
        async with self._weights:
            await asyncio.sleep(validation.seconds)
        return validation.seconds

    async def _pull(self, role: str, version: int) -> None:
        """Have a role's copy of the weights load a version, unless it holds it."""
        if self._held.get(role) != version:
            await asyncio.sleep(self.profile.sync.pull_s)
            self._held[role] = version

    async def _commit(self, replica: Replica, version: int) -> float:
        """Serve a prepared version; return the seconds with open requests since the last load."""
        sync = self.profile.sync
        await asyncio.sleep(sync.turn_s - sync.stall_s)
        if sync.stall_s:
            self.pool.stall(replica, sync.stall_s)
            await asyncio.sleep(sync.stall_s)
        if replica.is_up:
            self.pool.serve(replica, version)
        return self.pool.take_open_s(replica)

    def _publication(self, version: int, open_s: float) -> Publication:
        sync, replicas = self.profile.sync, self.setting.replicas
        facts: dict[str, Any] = {
            "transfer_s": sync.transfer_s * replicas,
            "load_s": sync.load_s * replicas,
            "commit_s": sync.turn_s * replicas,
            "stall_s": sync.stall_s * replicas,
            "busy_s": open_s,
            "replicas": replicas,
        }

        gather_s = self.profile.stages.gather.seconds(0.0, self.setting.devices_of("train"))
        return Publication(version=version, num_bytes=0, gather_s=gather_s, tensors_proved=0, **facts)

    async def _on(self, batch: StepBatch, role: str, stage: Stage | None) -> StepBatch:
        """Run a stage on a batch; record its time."""
        assert stage is not None, f"the run has no stage {role}"
        seconds = await self._stage(stage, float(batch.payload), self.setting.devices_of(role))
        return replace(batch, timing_s={**batch.timing_s, role: seconds})

    async def _stage(self, stage: Stage, tokens: float = 0.0, devices: int = 0) -> float:
        """Wait for the duration of a stage; return it."""
        seconds = stage.seconds(tokens, devices)
        if stage.cv and seconds:
            sigma = math.sqrt(math.log1p(stage.cv**2))
            seconds *= self._random.lognormvariate(-sigma * sigma / 2, sigma)
        if seconds:
            await asyncio.sleep(seconds)
        return seconds

    async def _fail_at_random(self, replica: Replica, mtbf_s: float) -> None:
        """Fail and restart a replica again and again."""
        while True:
            await asyncio.sleep(self._random.expovariate(1 / mtbf_s))
            self.pool.fail(replica)
            await asyncio.sleep(self.profile.failures.restart_s)
            async with self._weights:
                self.pool.revive(replica, self._newest)
