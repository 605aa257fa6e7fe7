# SPDX-License-Identifier: Apache-2.0
"""The part of the trainer that runs verl's stages, and computes log-probs: here, or on copies with devices of
their own.

A copy holds a version that was gathered and not overwritten yet; see `PolicyCopy`.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from functools import wraps
from types import SimpleNamespace
from typing import Any

import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.workers.utils.padding import response_from_nested

from ...config.placement import Placement, Pool
from ...config.schema import AsyncPipelineConfig
from ...core.flow import AsyncTrainingFlow
from ...core.items import StepBatch
from ...errors import WeightSyncError
from ...observe.summary import one_line
from ...weight_sync.manifest import Ticket
from ..ray_calls import ASK_S, got
from ..rollout.device_holder import node_id
from ..rollout.replica_pool import RolloutPool
from ..sample_columns import trained_columns
from ..workers.log_prob_group import end_group, retry_on_actor_death, start_group
from ..workers.policy_copy import PolicyCopy
from ..workers.training_worker import REF_COLUMN
from .checkpointing import ResumableTrainer
from .terminal import say


class LogProbTrainer(ResumableTrainer):
    """Base of `AsyncPipelineTrainer`, which sets what is declared here."""

    knobs: AsyncPipelineConfig
    placement: Placement
    rollout_pool: RolloutPool
    ref_policy_wg: Any
    processor: Any
    """verl's, of models that see or hear; else None."""
    _flow: AsyncTrainingFlow
    _tickets: dict[int, Ticket]
    """Of the versions that lie in the arenas."""

    async def compute_log_probs(self, batch: StepBatch) -> StepBatch:
        if "logp" not in self._copies:
            return await self._on_workers(batch, self._compute_old_log_prob, "old_log_prob")
        return await self._outliving("logp", lambda: self._old_log_probs_of_the_copy(batch))

    async def _old_log_probs_of_the_copy(self, batch: StepBatch) -> StepBatch:
        policy = self._copies["logp"]
        pulled = await self._pull(policy, self.schedule.old_policy(batch.step))

        def compute(batch: KVBatchMeta, metrics: dict[str, Any]) -> Any:
            # verl's own code, which asks its trainer for no more than this.
            view = SimpleNamespace(config=self.config, actor_rollout_wg=policy.group)
            return PPOTrainer._compute_old_log_prob(view, batch, metrics=metrics)

        return (await self._on_workers(batch, compute, "old_log_prob")).with_results(old_log_prob_load=pulled)

    async def compute_ref_log_probs(self, batch: StepBatch) -> StepBatch:
        return await self._outliving("ref_logp", lambda: self._ref_log_probs(batch))

    async def _outliving(self, role: str, work: Callable[[], Awaitable[StepBatch]]) -> StepBatch:
        """Work of a role, done again if its workers die that have devices of their own."""
        own = self.placement.own_pool_of(role)
        if own is None:
            return await work()

        async def start_anew(error: Exception) -> None:
            say(f"a worker of {role} died; all of them start anew. {one_line(error)}")
            self._flow.log.append(role, "FENCED", replica=role)
            await self._call(
                self._start_anew, role, self.resource_pool_manager.resource_pool_dict[verls_name(own)]
            )
            self._flow.log.append(role, "REJOINED", replica=role)
            say(f"the workers of {role} compute again")

        return await retry_on_actor_death(work, start_anew)

    def _start_anew(self, role: str, pool: Any) -> None:
        """Workers on the same devices, which hold what the run began with."""
        end_group(self._copies["logp"].group if role == "logp" else self.ref_policy_wg)
        group = start_group(role, pool, self.config)
        if role == "ref_logp":
            self.ref_policy_wg = group
        if role in self._copies:
            self._copies[role] = self._policy_copy(role, group)

    async def _ref_log_probs(self, batch: StepBatch) -> StepBatch:
        policy = self._copies.get("ref_logp")
        pulled = 0.0 if policy is None else await self._pull(policy, self.schedule.reference(batch.step))
        return (await self._on_workers(batch, self._compute_ref_log_prob, "ref")).with_results(
            ref_load=pulled
        )

    async def _pull(self, policy: PolicyCopy, version: int | None) -> float:
        """Have a copy hold a version; returns the seconds that it took."""
        if version is None or version == policy.version:
            return 0.0
        if version not in self._tickets:
            raise WeightSyncError(
                f"{policy.role} needs version {version}, which lies in memory no more; resume from a "
                "checkpoint"
            )
        started = time.perf_counter()
        await self._call(policy.load, self._tickets[version], self.knobs.weight_sync.timeout_s)
        return time.perf_counter() - started

    def _policy_copy(self, role: str, group: Any) -> PolicyCopy:
        return PolicyCopy(role, group, self.rollout_pool.courier_for(self._nodes_of(group.workers)))

    @staticmethod
    def _nodes_of(workers: Sequence[Any]) -> list[str]:
        asked = [worker.__ray_call__.remote(node_id) for worker in workers]
        nodes: list[str] = got(asked, ASK_S, owner="the trainer", what="workers to say where they are")
        return nodes

    async def _stage(self, batch: StepBatch, function: Callable[..., Any], timer: str) -> StepBatch:
        metrics: dict[str, Any] = {}
        started = time.perf_counter()
        await self._call(function, own_copy(batch.payload), metrics=metrics)
        return batch.with_results(metrics=metrics, **{timer: time.perf_counter() - started})

    async def _on_workers(self, batch: StepBatch, function: Callable[..., Any], timer: str) -> StepBatch:
        """A stage that hands the batch to training workers."""

        @wraps(function)
        def run(meta: KVBatchMeta, metrics: dict[str, Any]) -> Any:
            meta.fields = trained_columns(meta, pictures=self.processor is not None)
            return function(meta, metrics=metrics)

        return await self._stage(batch, run, timer)

    def _compute_ref_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """As verl's, from a column that old log-probs of another batch cannot overwrite."""
        batch.extra_info.update(
            calculate_entropy=False,
            compute_loss=False,
            temperature=self.config.actor_rollout_ref.rollout.temperature,
        )
        self.ref_policy_wg.compute_ref_log_prob(batch)
        data = tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=[REF_COLUMN, "response_mask"]
        )
        data["ref_log_prob"] = response_from_nested(data.pop(REF_COLUMN), data["response_mask"])
        tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=data.select("ref_log_prob"))
        return batch

    async def gather(self, version: int) -> Ticket:
        tickets = await self._call(self.actor_rollout_wg.gather_weights, version)
        ticket: Ticket | None = next((t for t in tickets if t is not None), None)
        if ticket is None:
            raise WeightSyncError(f"no training rank returned a ticket of version {version}")
        newest = max(self._tickets, default=version)
        self._tickets = {v: t for v, t in self._tickets.items() if v == newest} | {version: ticket}
        return ticket


def verls_name(pool: Pool) -> str:
    """A pool's name for verl, which has some of its own."""
    return f"pipeline_{pool.name}"


def own_copy(meta: KVBatchMeta) -> KVBatchMeta:
    """verl's stages write into `extra_info` and reorder in place; each gets its own."""
    return KVBatchMeta(
        partition_id=meta.partition_id,
        keys=list(meta.keys),
        tags=[dict(tag) for tag in meta.tags],
        extra_info=dict(meta.extra_info or {}),
    )
