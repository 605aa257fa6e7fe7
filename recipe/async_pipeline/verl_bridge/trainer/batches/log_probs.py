# SPDX-License-Identifier: Apache-2.0
"""Old and reference log-probs, on the training workers or on workers with separate devices.

The latter are copies of the policy (`PolicyCopy`), which load a version from the arenas. They are restarted
if they die. A refreshed reference outlives its version in the arenas, so it is kept on disk for that case;
on the training devices it is not, because a run does not survive the death of their workers.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transfer_queue as tq
from omegaconf import DictConfig
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl import DataProto
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.workers.utils.padding import response_from_nested, response_to_nested

from ....config.derived.adapters import adapter_rank
from ....config.placement import Placement, Pool
from ....core.groups.items import StepBatch
from ....core.schedule import Schedule
from ....observe.causes import one_line
from ...calls.ray_calls import ASK_S, BlockingCalls, got
from ...rollout.device_holder import node_id
from ...workers.log_prob_group import end_group, has_adapters, retry_on_actor_death, start_group
from ...workers.policy_copy import PolicyCopy
from ...workers.training_worker import REF_COLUMN
from ..checkpointing import is_of_disk
from ..reporting.terminal import say
from ..weight_publisher import WeightPublisher
from .verl_stages import VerlStages


class LogProbs:
    """Computes log-probs for the stages `logp` and `ref_logp`."""

    def __init__(
        self,
        *,
        config: DictConfig,
        placement: Placement,
        schedule: Schedule,
        stages: VerlStages,
        calls: BlockingCalls,
        publisher: WeightPublisher,
        pools: Callable[[], dict[str, Any]],
        old_group: Any | None,
        reference_group: Any | None,
        folder: Path,
        note: Callable[..., object],
    ) -> None:
        """`pools` returns verl's resource pools by name. `old_group` has the workers of a pool for `logp`.

        `folder` is for a reference that is kept on disk. `note(stage, event, **fields)` logs an event. Blocks
        on Ray calls.
        """
        self._config, self._placement, self._schedule = config, placement, schedule
        self._stages, self._calls, self._publisher, self._pools = stages, calls, publisher, pools
        self._note = note
        self.reference_group = reference_group
        self._in_actor = adapter_rank(config) > 0 and placement.own_pool_of("ref_logp") is None
        """Whether the reference is the trained model without its adapters."""
        self.copies: dict[str, PolicyCopy] = {}
        """Copies of the policy that hold published versions, by stage."""
        if old_group is not None:
            self._add_copy(PolicyCopy("logp", old_group))
        if schedule.ref_refresh_every:
            self._add_copy(PolicyCopy("ref_logp", reference_group, folder))

    async def old(self, batch: StepBatch) -> StepBatch:
        """Add the log-probs of the policy that the schedule chooses."""
        if "logp" in self.copies:
            return await self._with_restarts("logp", lambda: self._old_from_copy(batch))
        stage = self._stages.at(batch.step)._compute_old_log_prob
        return await self._stages.run_on_workers(batch, stage, "old_log_prob")

    async def of_update(self, batch: StepBatch) -> StepBatch:
        """Add the log-probs that the update has computed, and the metrics of verl's stages that read them."""
        workers = SimpleNamespace(compute_log_prob=self._stages.workers.log_probs_of_update)
        view = SimpleNamespace(config=self._config, actor_rollout_wg=workers)

        def store(meta: KVBatchMeta, metrics: dict[str, Any]) -> None:
            meta.fields = ["response_mask"]
            PPOTrainer._compute_old_log_prob(view, meta, metrics=metrics)
            self._correct(meta, metrics)

        return await self._stages.run(batch, store, "old_log_prob")

    async def before_update(self, batch: StepBatch) -> StepBatch:
        """Add the log-probs of a batch that takes several updates, because responses have several rows."""

        def compute(meta: KVBatchMeta, metrics: dict[str, Any]) -> None:
            self._stages.at(batch.step)._compute_old_log_prob(meta, metrics=metrics)
            if (weights := self._correct(meta, metrics)) is not None:
                fields = TensorDict({"rollout_is_weights": weights}, batch_size=len(meta))
                tq.kv_batch_put(keys=meta.keys, partition_id=meta.partition_id, fields=fields)

        return await self._stages.run_on_workers(batch, compute, "old_log_prob")

    def _correct(self, meta: KVBatchMeta, metrics: dict[str, Any]) -> torch.Tensor | None:
        """Add verl's metrics of the correction; return its weights, jagged (batch, response length)."""
        correction = self._config.algorithm.get("rollout_correction")
        if correction is None or not self._config.actor_rollout_ref.rollout.calculate_log_probs:
            return None
        columns = ["old_log_probs", "rollout_log_probs", "response_mask"]
        data = tq.kv_batch_get(keys=meta.keys, partition_id=meta.partition_id, select_fields=columns)
        padded = DataProto(batch=data.to_padded_tensor())
        corrected, found = compute_rollout_correction_and_add_to_batch(padded, correction)
        metrics.update(found)
        weights = corrected.batch.get("rollout_is_weights")
        return None if weights is None else response_to_nested(weights, data["response_mask"])

    async def reference(self, batch: StepBatch) -> StepBatch:
        """Add the log-probs of the reference policy of the step."""
        return await self._with_restarts("ref_logp", lambda: self._from_reference(batch))

    def compute_reference(self, batch: KVBatchMeta) -> KVBatchMeta:
        """Compute as verl does, but through a separate column.

        In verl's column, old log-probs of another batch could overwrite the result.
        """
        group = self.reference_group
        assert group is not None
        batch.extra_info.update(
            calculate_entropy=False,
            compute_loss=False,
            temperature=self._config.actor_rollout_ref.rollout.temperature,
        )
        if self._in_actor:
            batch.extra_info["no_lora_adapter"] = True
            group.compute_base_log_prob(batch)
        else:
            # Until it is refreshed, a reference with adapters is its base.
            if has_adapters(self._config) and self.copies["ref_logp"].version is None:
                batch.extra_info["no_lora_adapter"] = True
            group.compute_ref_log_prob(batch)

        data = tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=[REF_COLUMN, "response_mask"]
        )
        data["ref_log_prob"] = response_from_nested(data.pop(REF_COLUMN), data["response_mask"])
        tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=data.select("ref_log_prob"))
        return batch

    async def _old_from_copy(self, batch: StepBatch) -> StepBatch:
        policy = self.copies["logp"]
        loaded_s = await self._publisher.load_into(policy, self._schedule.old_policy(batch.step))
        # verl's code reads only these attributes of its trainer.
        view = SimpleNamespace(config=self._config, actor_rollout_wg=policy.group)

        def compute(meta: KVBatchMeta, metrics: dict[str, Any]) -> Any:
            return PPOTrainer._compute_old_log_prob(view, meta, metrics=metrics)

        done = await self._stages.run_on_workers(batch, compute, "old_log_prob")
        return done.with_results(old_log_prob_load=loaded_s)

    async def _from_reference(self, batch: StepBatch) -> StepBatch:
        policy, loaded_s, kept_s = self.copies.get("ref_logp"), 0.0, 0.0
        if policy is not None:
            loaded_s = await self._publisher.load_into(policy, self._schedule.reference(batch.step))
            # Before the batch is trained, since the second version after that takes the place in memory.
            kept_s = await self._calls(self.keep_reference)
        stage = self._stages.at(batch.step)._compute_ref_log_prob
        done = await self._stages.run_on_workers(batch, stage, "ref")
        return done.with_results(ref_load=loaded_s, ref_save=kept_s)

    def keep_reference(self) -> float:
        """Keep a refreshed reference on disk, once, and return the seconds that this took. Blocks.

        If the disk is full, the run continues; it ends if the workers die while they need that reference.
        """
        policy = self.copies["ref_logp"]
        version, own_pool = policy.version, self._placement.own_pool_of("ref_logp")
        if version is None or own_pool is None or version in (policy.kept, policy.not_kept):
            return 0.0
        if self._schedule.reference(version + 2) != version:
            return 0.0  # It is used for a single step: no checkpoint needs it.

        started = time.perf_counter()
        try:
            policy.keep()
        except Exception as error:
            if not is_of_disk(error):
                raise
            if policy.not_kept is None:
                say(
                    f"WARNING: the reference, version {version}, cannot be kept on disk; the run continues, "
                    f"but ends if a worker of ref_logp dies: {one_line(error)}"
                )
            policy.not_kept, policy.reason = version, one_line(error)
        return time.perf_counter() - started

    def close(self) -> None:
        """Delete what was kept on disk for restarts. Blocks."""
        for policy in self.copies.values():
            policy.forget()

    async def _with_restarts(self, stage: str, work: Callable[[], Awaitable[StepBatch]]) -> StepBatch:
        """Run `work` again on new workers if workers with separate devices die."""
        pool = self._placement.own_pool_of(stage)
        if pool is None:
            return await work()

        async def restart(error: Exception) -> None:
            say(f"a worker of {stage} died; restarting all of them. {one_line(error)}")
            self._note(stage, "FENCED", replica=stage)
            await self._calls(self._restart, stage, self._pools()[verls_name(pool)])
            self._note(stage, "REJOINED", replica=stage)
            say(f"the workers of {stage} compute again")

        return await retry_on_actor_death(work, restart)

    def _restart(self, stage: str, pool: Any) -> None:
        """Start workers on the same devices, with the initial weights."""
        end_group(self.copies["logp"].group if stage == "logp" else self.reference_group)
        group = start_group(stage, pool, self._config)
        if stage == "ref_logp":
            self.reference_group = group
        if stage in self.copies:
            self.copies[stage].restarted(group)
            self._add_copy(self.copies[stage])

    def _add_copy(self, policy: PolicyCopy) -> None:
        self._publisher.rollout_pool.has_copy(policy.role, nodes_of(policy.group.workers))
        self.copies[policy.role] = policy


def nodes_of(workers: Sequence[Any]) -> list[str]:
    """Return the Ray node of each worker. Blocks."""
    refs = [worker.__ray_call__.remote(node_id) for worker in workers]
    nodes: list[str] = got(refs, ASK_S, owner="the trainer", what="the workers to report their nodes")
    return nodes


def verls_name(pool: Pool) -> str:
    """Return the name of a pool in verl; the prefix avoids the names of verl's pools."""
    return f"pipeline_{pool.name}"
