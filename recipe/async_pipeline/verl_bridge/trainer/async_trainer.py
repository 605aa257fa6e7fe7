# SPDX-License-Identifier: Apache-2.0
"""verl's V1 PPOTrainer as the executor of the pipeline: the trainer that verl sees.

`fit` runs `AsyncTrainingFlow`, whose stages call the coroutines below. They delegate to the objects that the
trainer is composed of:

    Startup          place workers, start rollout servers                      startup.py
    Generation       generate groups, assemble them into a batch               generation.py
    VerlStages       verl's stages, as of the step of a batch                  verl_stages.py
    LogProbs         old and reference log-probs, also on separate devices     log_probs.py
    WeightPublisher  gather and publish weights                                weight_publisher.py
    Checkpointing    checkpoints                                               checkpointing.py
    StepReport       metrics and the step table                                step_report.py

They run blocking code in threads (`BlockingCalls`). The `schedule` decides about order and lag.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from functools import cached_property
from typing import Any, ClassVar, Literal

from omegaconf import DictConfig, OmegaConf
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.tracking import Tracking, ValidationGenerationsLogger
from verl.workers.rollout.llm_server import LLMServerClient

from ...config.scheduling import schedule_of
from ...core.bad_data import BadData
from ...core.deadline import all_of
from ...core.degradation import Caution, Change
from ...core.flow import GRAPH, AsyncTrainingFlow
from ...core.flow_state import FlowState
from ...core.items import Group, Prompt, PromptBatch, Publication, StepBatch, Ticket
from ...core.recall import Recall
from ...core.schedule import Schedule
from ...errors import PatchedVerlRequired
from ...observe.observers import Observers
from ...observe.step_account import StepAccountant
from ...observe.summary import RunRecorder, write_atomically
from ...observe.trace import leave_trace
from ...patching.patched_tree import require_known
from ...patching.verl_source import find_verl_root
from ...redaction import redacted
from ...weight_sync.manifest import Ticket as WeightTicket
from .. import checkpoint_engine as _checkpoint_engine  # noqa: F401 - registers `dual_buffer`
from .. import plugin
from ..agent_loop import template_check
from ..agent_loop.manager import PushAgentLoopManager
from ..interrupts import until_cancelled
from ..reward import worker_manager
from ..rollout.replica_pool import RolloutPool
from ..rollout.server_manager import ColocatedLoadBalancer
from ..run_config import knobs_of, runtime_of
from ..sample_store import count_cores_once
from . import checkpoint_contents, composition
from .calls import BlockingCalls
from .checkpoint_contents import Restored, kept_groups
from .checkpointing import load_models, load_reference
from .generation import PARTITION
from .prompt_source import PromptSource
from .run_folder import RunFolder, speed_settings
from .run_loop import run_flow
from .sample_metrics import SampleMeters
from .startup import Startup
from .terminal import say
from .validation_buffer import ValidationBuffer
from .verl_stages import VerlStages
from .weight_publisher import WeightPublisher

CLOSE_S = 5.0
"""Seconds for the workers to unlink their shared memory, and to delete a kept reference, at the end."""
TRACE_S = 60.0
"""Seconds for writing the trace of the run; after a timeout, `async-pipeline report` can write it later."""


class AsyncPipelineTrainer(PPOTrainer):
    """The trainer of all strategies, which differ in their schedule; see `strategies`."""

    _enable_hybrid_replicas = False
    """Read by verl: no rollout engine on the training devices."""
    schedule_class: ClassVar[type[Schedule] | None] = None
    """The schedule of a custom trainer class, or None to use the schedule of the configured strategy."""

    trainer_mode: str
    """verl's name for the strategy; several of its methods check whether it is `sync`."""
    rollout_pool: RolloutPool
    resumed: FlowState | None = None
    _restored: Restored | None = None
    _flow: AsyncTrainingFlow

    def __init__(self, config: DictConfig) -> None:
        """Raises PatchedVerlRequired if verl in this process lacks the plugin or is not the pinned one."""
        if not plugin.is_loaded():
            raise PatchedVerlRequired("verl did not load our plugin; run `pip install -e .` here, then retry")
        require_known(find_verl_root())
        worker_manager.install()
        count_cores_once()
        ColocatedLoadBalancer.use()
        super().__init__(config)

        self.knobs, self.runtime = knobs_of(config), runtime_of(config)
        self.placement = self.runtime.placement
        faults = self.knobs.faults
        self.caution = Caution(after=faults.degrade_after_failures, clean=faults.restore_after_successes)
        self.wait_timeout_s: float | None = faults.wait_timeout_s

        self.calls = BlockingCalls(self.wait_timeout_s)
        self.stages = VerlStages(self, self.calls)
        self.startup = Startup(config, self.knobs, self.placement, self.calls)
        self.observers = Observers(say, strict=faults.strict_observers)
        self.meters = SampleMeters(config, self.knobs.staleness.max_lag)
        policies = faults.bad_data.by_kind(self.knobs.reward.failure)
        self.bad_data = BadData(policies, faults.max_prompt_attempts, say)

    # verl's start-up: verl calls these methods in this order.

    def _init_dataloader(self) -> None:
        """Draw whole batches, as verl's sync trainer does, to see the same prompts in the same order."""
        mode, self.trainer_mode = self.trainer_mode, "sync"
        try:
            super()._init_dataloader()
        finally:
            self.trainer_mode = mode
        self.prompts = PromptSource(self._next_train_batch, self.train_dataloader)
        template_check.warn(self.config, self.tokenizer, say)

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        self.startup.place_workers(self.role_worker_mapping, self.resource_pool_manager)

    def _load_checkpoint(self) -> None:
        self.global_steps = 0
        if self.runtime.resume_from is not None:
            self._restored = checkpoint_contents.read(self.runtime.resume_from)
            self._resume(self._restored)
        self.stages.start(self.global_steps)

    def _resume(self, restored: Restored) -> None:
        state = restored.state
        self.resumed, self.global_steps = state.flow, state.flow.step
        load_models(restored, self.actor_rollout_wg, self.critic_wg if self.use_critic else None)
        if state.kl_coef is not None:
            self.kl_ctrl_in_reward.value = state.kl_coef
        self.bad_data.restore(state.meters["bad_data"])
        self.prompts.restore(state.prompts, restored.loader, restored.transcripts)

        groups = kept_groups(state)
        checkpoint_contents.put(groups, restored.samples, PARTITION)
        for group in groups:
            self.meters.finished(group.uid, group.trajectories)
        say(
            f"resumed from {restored.folder}: step {self.global_steps}, {len(groups)} finished groups, "
            f"{len(state.flow.in_flight())} prompts to be generated again"
        )

    def _setup(self) -> None:
        """Start training workers and rollout servers concurrently: they do not depend on each other."""
        say("starting training workers and rollout servers")
        super()._setup()
        say("training workers are up")

        self.startup.servers.attach(self.llm_server_manager.global_load_balancer)
        PushAgentLoopManager.start_early(
            config=self.config,
            llm_client=self.get_llm_client(),
            teacher_client=None,
            reward_loop_worker_handles=self.get_reward_handles(),
        )

        self.rollout_pool = self.startup.rollout_pool(self._note_replica, self._note_size)
        self.publisher = WeightPublisher(
            self.actor_rollout_wg, self.rollout_pool, self.calls, self.knobs.weight_sync.timeout_s
        )
        self.log_probs = composition.log_probs(self)
        if self._restored is not None and "ref_logp" in self.log_probs.copies:
            load_reference(self._restored, self.log_probs.copies["ref_logp"])
            self.log_probs.keep_reference()
        replicas, name = len(self.rollout_pool.replicas), self.config.actor_rollout_ref.rollout.name
        say(f"{replicas} rollout replica(s) are up ({name})")

    # Methods that verl calls.

    def _build_replay_buffer(self) -> ValidationBuffer:
        return ValidationBuffer()

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        """Return a multiple that is also divisible by the number of devices of each other pool."""
        pools = map(self.placement.own_pool_of, ("logp", "ref_logp", "critic"))
        others = [pool.devices for pool in pools if pool is not None]
        return math.lcm(super()._get_required_batch_multiple(dp_size), *others)

    def _compute_ref_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        return self.log_probs.compute_reference(batch)

    def get_llm_client(self) -> LLMServerClient:
        return self.startup.servers.get_client()

    def on_step_end(self) -> None:
        """Do nothing: verl's serial loop is not used."""

    def on_sample_end(self) -> None:
        """Do nothing: verl's serial loop is not used."""

    def _get_n_gpus_for_throughput(self) -> int:
        return sum(self.pools().values())

    # The run.

    def fit(self, agent_loop_manager: Any) -> None:
        """Train until the last step. Raises the first error of any stage, after writing the summary."""
        self.open_run(agent_loop_manager)
        try:
            asyncio.run(until_cancelled(run_flow(self)))
        finally:
            # Also after a failure, but without waiting for a worker that may be stuck.
            trace = self.calls.submit(leave_trace, self.folder.path, say)
            ends = (self.actor_rollout_wg.close_arenas, self.log_probs.close)
            wait([self.calls.submit(end) for end in ends], timeout=CLOSE_S)
            wait([trace], timeout=TRACE_S)
            self.calls.close()
        self._shutdown_dump_executor()

    def open_run(self, agent_loop_manager: PushAgentLoopManager) -> None:
        """Open the run's folder and trackers, and create the parts that work on prompts and steps."""
        # verl's `fit`, which is not used, sets this attribute; verl's `_validate` reads it.
        self.agent_loop_manager = agent_loop_manager
        resumed_step = None if self.resumed is None else self.resumed.step
        self.folder = RunFolder(self.runtime.run_dir, self.runtime.run, resumed_step)
        settings = redacted(OmegaConf.to_container(self.config, resolve=True))
        write_atomically(self.folder.path / "config.json", settings, unknown=str)
        write_atomically(
            self.folder.path / "settings.json", speed_settings(self.config, self.knobs, self.runtime)
        )
        names = {name: self.config.trainer[name] for name in ("project_name", "experiment_name")}
        self.logger = Tracking(**names, default_backend=self.config.trainer.logger, config=settings)
        self.validation_generations_logger = ValidationGenerationsLogger(**names)

        self.recorder = RunRecorder(
            strategy=self.knobs.strategy,
            max_lag=self.schedule.max_lag,
            started_unix=self.runtime.started_unix,
        )
        if self._restored is not None:
            self.recorder.restore(self._restored.state.meters["recorder"])
        self._restored = None
        self.folder.repeat_rows(self.logger)

        self.accounts = StepAccountant()
        self.generation = composition.generation(self, agent_loop_manager)
        self.report = composition.step_report(self)
        self.checkpointing = composition.checkpointing(self, agent_loop_manager)
        self.elasticity = composition.elasticity(self)

    def _note(self, stage: str, event: str, **fields: Any) -> None:
        self._flow.log.append(stage, event, **fields)

    def _note_replica(self, event: str, name: str, version: int | None, **fields: str) -> None:
        known: dict[str, Any] = {} if version is None else {"version": version}
        self._note("param_update", event, replica=name, **known, **fields)

    def _note_size(self, replicas: int) -> None:
        """Note the devices of the pool for generation after a replica has joined or left."""
        pool = self.placement.pool_of("generate")
        assert pool is not None
        devices = replicas * composition.devices_of_a_replica(self)
        self._note("param_update", "RESIZED", pool=pool.name, devices=devices)

    # PipelineTrainer: facts and decisions.

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule of this process; do not read it before the checkpoint is loaded."""
        trainer = self.config.trainer
        by_epochs = self.steps_per_epoch * trainer.total_epochs
        return schedule_of(
            self.knobs,
            strategy=self.schedule_class,
            batch=self.config.data.train_batch_size,
            first_step=1 if self.resumed is None else self.resumed.step + 1,
            last_step=int(min(self.total_training_steps, by_epochs)),
            old_logp=self.runtime.old_logp,
            validate_every=max(0, trainer.test_freq),
            validate_first=bool(trainer.get("val_before_train", True)),
            save_every=max(0, trainer.save_freq),
        )

    @property
    def facts(self) -> Mapping[str, Any]:
        return {"run": self.runtime.run, "unix": round(time.time(), 3), **self.runtime.identity}

    def roles(self) -> Sequence[str]:
        without = set() if self.use_reference_policy else {"ref_logp"}
        without |= set() if self.use_critic else {"values", "critic"}
        return [role for role in GRAPH if role not in without]

    def pools(self) -> Mapping[str, int]:
        return {pool.name: pool.devices for pool in self.placement.pools}

    def pool_of(self, role: str) -> str | None:
        pool = self.placement.pool_of({"param_update": "train", "values": "critic"}.get(role, role))
        return None if pool is None else pool.name

    def rejects(self, group: Group) -> Literal["filtered", "failed"] | None:
        return self.generation.rejects(group)

    # PipelineTrainer: work.

    async def draw_prompts(self, ticket: Ticket) -> PromptBatch:
        return await self.generation.draw(ticket)

    async def restore_prompts(self, uids: Sequence[str]) -> Sequence[Prompt]:
        """Return the prompts, with the partial responses of the earlier process in their payload."""
        return self.prompts.found(uids)

    async def generate_group(self, prompt: Prompt, recall: Recall) -> Group | None:
        return await self.generation.generate(prompt, recall)

    async def discard(self, group: Group) -> None:
        await self.generation.discard(group)

    async def assemble(self, step: int, groups: Sequence[Group]) -> StepBatch:
        return await self.generation.assemble(step, groups)

    async def compute_log_probs(self, batch: StepBatch) -> StepBatch:
        return await self.log_probs.old(batch)

    async def compute_ref_log_probs(self, batch: StepBatch) -> StepBatch:
        return await self.log_probs.reference(batch)

    async def compute_values(self, batch: StepBatch) -> StepBatch:
        return await self.stages.values(batch)

    async def compute_advantages(self, batch: StepBatch) -> StepBatch:
        return await self.stages.advantages(batch)

    async def update(self, batch: StepBatch) -> StepBatch:
        if batch.step < self.config.trainer.critic_warmup:
            return batch
        return await self.stages.update_actor(batch)

    async def update_critic(self, batch: StepBatch) -> StepBatch:
        return await self.stages.update_critic(batch)

    async def finish_step(self, batch: StepBatch, facts: Mapping[str, float]) -> None:
        await self.report.finish(batch, facts)

    async def save(
        self, state: FlowState, *, models_read: Callable[[], object], all_read: Callable[[], object]
    ) -> bool:
        return await self.checkpointing.save(state, models_read=models_read, all_read=all_read)

    async def gather(self, version: int) -> WeightTicket:
        return await self.publisher.gather(version)

    async def publish(self, version: int, snapshot: object) -> Publication:
        assert isinstance(snapshot, WeightTicket)
        return await self.publisher.publish(snapshot)

    def stepped(self, change: Change) -> None:
        say(f"weight updates are now {change.level.name.lower().replace('_', '-')}: {change.why}")

    async def watch(self) -> None:
        await all_of(self.rollout_pool.watch(), self.elasticity.run(), self.report.watch())

    async def validate(self, version: int) -> float | None:
        """Validate a version that replicas have just loaded, if it is due. They keep it meanwhile.

        Returns the duration in seconds, or None if the version is not validated.
        """
        if not self.schedule.validates(version):
            return None
        if self.knobs.validation == "pause":
            with self.generation.paused():
                return await self._validate_version(version)
        return await self._validate_version(version)

    async def _validate_version(self, version: int) -> float:
        async with self.rollout_pool.weights("validation"):
            started = time.perf_counter()
            metrics = await self.calls(self.stages.at(version)._validate)
        seconds = time.perf_counter() - started
        await self.report.log_validation(version, metrics, seconds)
        return seconds
