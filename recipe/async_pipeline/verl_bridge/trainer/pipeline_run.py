# SPDX-License-Identifier: Apache-2.0
"""One run of the pipeline: creates its parts, runs the flow, and does the work of the stages.

    Startup          place workers, start rollout servers                      startup.py
    Generation       generate groups, assemble them into a batch               generation.py
    VerlStages       verl's stages, as of the step of a batch                  verl_stages.py
    LogProbs         old and reference log-probs, also on separate devices     log_probs.py
    WeightPublisher  gather and publish weights                                weight_publisher.py
    Checkpointing    checkpoints                                               checkpointing.py
    StepReport       metrics and the step table                                step_report.py

They run blocking code in threads (`BlockingCalls`). The `schedule` decides about order and lag. verl knows
only its trainer (`verl_trainer.py`), which calls `restore`, `connect` and `run`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.tracking import Tracking, ValidationGenerationsLogger

from ...agents.episodes import metrics_of
from ...config.derived.scheduling import schedule_of
from ...core.flow import AsyncTrainingFlow
from ...core.flow_state import FlowState
from ...core.graph import GRAPH, insert_custom_stages
from ...core.groups.bad_data import BadData
from ...core.groups.items import Admission, Group, Prompt, PromptBatch, Publication, StepBatch
from ...core.groups.recall import Recall
from ...core.lag.degradation import Caution, Change
from ...core.schedule import Schedule
from ...core.waits.deadline import all_of
from ...core.waits.diagnosis import diagnose
from ...core.waits.wait_graph import Wait, waits_of
from ...observe.account.accountant import OverlapMeter, StepAccountant
from ...observe.causes import causes
from ...observe.observers import ACCOUNT, FILE_ATTEMPTS, LOST, OVERLAP, SELECTION, Observers
from ...observe.run_directory.agent_output import FOLDER, AgentOutputFolder
from ...observe.run_directory.event_file import EventFile
from ...observe.run_directory.summary import RunRecorder, side_effects, write_atomically
from ...observe.table import closing, header
from ...observe.trackers import Trackers
from ...observe.watchdog import Watchdog
from ...redaction import redacted
from ...weight_sync.memory.manifest import WeightTicket
from ..agent_loop.manager import PushAgentLoopManager
from ..calls.ray_calls import BlockingCalls
from ..launch.run_config import knobs_of, runtime_of
from ..process.garbage import present_objects_frozen
from ..process.interrupts import until_cancelled
from ..rollout.elasticity import Elasticity
from ..rollout.replica_pool import RolloutPool
from ..rollout.server_manager import room_by_node
from ..rollout.teachers import Teachers
from ..rules.diffusers_rules import draws_images
from ..store import sample_store
from ..store.sample_columns import PARTITION
from . import checkpoint_contents
from .batches.generation import Generation
from .batches.log_probs import LogProbs
from .batches.prompt_source import PromptSource
from .batches.verl_stages import VerlStages
from .checkpoint_contents import Restored, kept_groups
from .checkpointing import Checkpointing, load_models, load_reference
from .reporting.episode_texts import KeptPictures
from .reporting.ray_metrics import InsightStates, RayGauges
from .reporting.ray_metrics import is_enabled as is_insight_enabled
from .reporting.run_folder import RunFolder, speed_settings
from .reporting.sample_metrics import SampleMeters
from .reporting.step_report import StepReport
from .reporting.terminal import echo, say
from .startup import Startup
from .weight_publisher import WeightPublisher

KEPT_RECORDS = 10_000
"""Number of events kept in memory; `events.jsonl` has all of them."""
CLOSE_S = 5.0
"""Seconds for the workers to unlink their shared memory, and to delete a kept reference, at the end."""


class PipelineRun:
    """The executor of the pipeline's stages on verl's workers: a `core.trainer_protocol.PipelineTrainer`."""

    verl: PPOTrainer
    prompts: PromptSource
    rollout_pool: RolloutPool
    _flow: AsyncTrainingFlow

    def __init__(self, verl: PPOTrainer, schedule_class: type[Schedule] | None = None) -> None:
        """`verl` is verl's trainer, not set up yet. `schedule_class`: None for the configured strategy's."""
        self.verl, self.config, self._schedule_class = verl, verl.config, schedule_class
        self.resumed: FlowState | None = None
        self._restored: Restored | None = None
        self.knobs, self.runtime = knobs_of(self.config), runtime_of(self.config)
        self.placement = self.runtime.placement
        faults = self.knobs.faults
        self.caution = Caution()
        self.wait_timeout_s: float | None = faults.wait_timeout_s

        self.calls = BlockingCalls(self.wait_timeout_s)
        self.stages = VerlStages(verl, self.calls, self.runtime.old_logp)
        self.startup = Startup(self.config, self.knobs, self.placement, self.calls)
        self.observers = Observers(say, strict=faults.strict_observers)
        self.meters = SampleMeters(self.config, self.knobs.staleness.max_lag)
        policies = faults.bad_data.by_kind(self.knobs.reward.failure)
        self.bad_data = BadData(policies, faults.max_prompt_attempts, say)

    # The start, in this order.

    def restore(self) -> None:
        """Load the checkpoint to resume from, if there is one, into verl's workers and this run."""
        self.verl.global_steps = 0
        if self.runtime.resume_from is not None:
            self._restored = checkpoint_contents.read(self.runtime.resume_from)
            self._resume(self._restored)
        self.stages.start(self.verl.global_steps)

    def _resume(self, restored: Restored) -> None:
        state = restored.state
        self.resumed, self.verl.global_steps = state.flow, state.flow.step
        load_models(
            restored, self.verl.actor_rollout_wg, self.verl.critic_wg if self.verl.use_critic else None
        )
        if state.kl_coef is not None:
            self.verl.kl_ctrl_in_reward.value = state.kl_coef
        self.bad_data.restore(state.meters["bad_data"])
        self.prompts.restore(state.prompts, restored.loader)

        groups = kept_groups(state)
        shards = state.shards_of(checkpoint_contents.SAMPLES)
        sample_store.restore(restored.folder, shards, groups, PARTITION, self.wait_timeout_s)
        for group in groups:
            self.meters.finished(group.uid, group.trajectories)
        say(
            f"resumed from {restored.folder}: step {self.verl.global_steps}, {len(groups)} finished groups, "
            f"{len(state.flow.in_flight())} prompts to be generated again"
        )

    def connect(self) -> None:
        """Connect verl's workers, which have started, with the rollout servers, and wait for these."""
        self.startup.servers.attach(self.verl.llm_server_manager.global_load_balancer)
        self.teachers = Teachers(
            getattr(self.verl.teacher_model_manager, "teacher_model_managers", {}),
            say,
            partial(self._note, "teacher"),
            self.knobs.faults.wait_timeout_s,
        )
        PushAgentLoopManager.start_early(
            config=self.config,
            llm_client=self.startup.servers.get_client(),
            teacher_client=self.teachers.clients(self.config),
            reward_loop_worker_handles=self.verl.get_reward_handles(),
        )

        self.rollout_pool = self.startup.rollout_pool(self._note_replica, self._note_size)
        self.publisher = WeightPublisher(
            self.verl.actor_rollout_wg,
            self.rollout_pool,
            self.calls,
            self.knobs.weight_sync.timeout_s,
            only_warn=self.knobs.engine_check == "warn",
        )
        self.log_probs = LogProbs(
            config=self.config,
            placement=self.placement,
            schedule=self.schedule,
            stages=self.stages,
            calls=self.calls,
            publisher=self.publisher,
            pools=lambda: self.verl.resource_pool_manager.resource_pool_dict,
            old_group=self.startup.group_of("logp"),
            reference_group=self.startup.group_of("ref_logp") or getattr(self.verl, "ref_policy_wg", None),
            folder=self.runtime.run_dir / "reference",
            note=self._note,
        )
        if self._restored is not None and "ref_logp" in self.log_probs.copies:
            load_reference(self._restored, self.log_probs.copies["ref_logp"])
            self.log_probs.keep_reference()
        replicas, name = len(self.rollout_pool.replicas), self.config.actor_rollout_ref.rollout.name
        say(f"{replicas} rollout replica(s) are up ({name})")

    # The run.

    def run(self, agent_loop_manager: PushAgentLoopManager) -> None:
        """Train until the last step. Raises the first error of any stage, after writing the summary."""
        with causes():
            self.open(agent_loop_manager)
            try:
                asyncio.run(until_cancelled(self._run(), self._save_on_notice))
            finally:
                # Also after a failure, but without waiting for a worker that may be stuck.
                ends = (self.verl.actor_rollout_wg.close_arenas, self.log_probs.close)
                wait([self.calls.submit(end) for end in ends], timeout=CLOSE_S)
                self.calls.close()

    async def _save_on_notice(self) -> None:
        """Have a checkpoint written; return once it is complete, or `faults.notice_s` have passed."""
        versions, checkpoints = self._flow.versions, self._flow.checkpoints
        notice_s, saved = self.knobs.faults.notice_s, asyncio.Event()
        step = checkpoints.request(max(versions.trained, versions.criticised))
        self._flow.log.subscribe(lambda _: saved.set() if checkpoints.last >= step else None, name="notice")
        say(f"SIGTERM: the run ends once step {step} has a checkpoint, at the latest in {notice_s:g} s")
        try:
            await asyncio.wait_for(saved.wait(), notice_s)
        except asyncio.TimeoutError:  # another class before Python 3.11
            say(f"step {step} has no checkpoint yet; the last complete one is of step {checkpoints.last}")

    async def _run(self) -> None:
        """Train until the last step. Raises the first error of any stage, after writing the summary."""
        folder, knobs, schedule = self.folder, self.knobs, self.schedule
        observers = self.observers
        flow = self._flow = AsyncTrainingFlow(
            trainer=self,
            enable_async_rl=True,
            keep_records=KEPT_RECORDS,
            startup_s=lambda: max(0.0, time.time() - self.runtime.started_unix),
            guard=observers.subscriber,
        )

        insert_custom_stages(flow.graph, knobs.custom_stages)
        overlap = OverlapMeter()
        flow.log.subscribe(overlap, name=OVERLAP)
        flow.log.subscribe(self.accounts, name=ACCOUNT)
        if is_insight_enabled():
            flow.log.subscribe(InsightStates(self.calls.submit), name="the spans of RL-Insight")
        flow.fates.subscribe(self.prompts.settled)
        flow.fates.subscribe(observers.guard(SELECTION, self.meters.settled, lost=LOST[SELECTION]))

        watchdog = Watchdog(folder.path / "diagnosis.txt", say=say)

        def expired(wait: Wait) -> str:
            diagnosis = diagnose(flow, wait)
            watchdog.tell(diagnosis)
            return diagnosis.cause

        waits_of().on_expiry = expired
        failure: BaseException | None = None
        with _events_of(folder.path, observers) as events, folder.ledger as ledger, watchdog:
            flow.log.subscribe(events, name="events.jsonl")
            flow.ledger.subscribe(ledger)
            steps = f"{schedule.first_step}..{schedule.last_step}"
            say(f"{knobs.strategy}, max_lag {schedule.max_lag}, steps {steps}")
            echo(header())
            self.report.begin()
            try:
                with present_objects_frozen():
                    await flow.run()
                await self.calls(ledger.sync)
            except BaseException as error:
                failure = error
                raise
            finally:
                await self.report.close()
                await self.calls.without_deadline(self.checkpointing.close)
                await self.verl.agent_loop_manager.close()
                await self.rollout_pool.close()
                overlap_s = overlap.seconds if observers.is_on(OVERLAP) else None
                summary = self.recorder.summarize(flow.result(), overlap_s, time.time(), failure)
                summary |= observers.value(ACCOUNT, self.accounts.summary, lost=LOST[ACCOUNT]) or {}
                summary |= side_effects(observers, flow.checkpoints if schedule.save_every else None)
                summary["bad_data"] = self.bad_data.summary()
                # A full disk must not replace the error of the run, nor end one that is complete.
                path = folder.path / "summary.json"
                observers.value(path.name, write_atomically, path, summary, lost="without that file")
                for line in closing(summary):
                    echo(line)

    def open(self, agent_loop_manager: PushAgentLoopManager) -> None:
        """Open the run's folder and trackers, and create the parts that work on prompts and steps."""
        # verl's `fit`, which is not used, sets these attributes; verl's `_validate` reads them.
        self.verl.agent_loop_manager = agent_loop_manager
        resumed_step = None if self.resumed is None else self.resumed.step
        self.folder = RunFolder(self.runtime.run_dir, self.runtime.run, resumed_step)
        settings = redacted(OmegaConf.to_container(self.config, resolve=True))
        write_atomically(self.folder.path / "config.json", settings, unknown=str)
        write_atomically(
            self.folder.path / "settings.json", speed_settings(self.config, self.knobs, self.runtime)
        )
        names = {name: self.config.trainer[name] for name in ("project_name", "experiment_name")}
        self.trackers = Trackers(
            self.config.trainer.logger,
            lambda name: Tracking(**names, default_backend=name, config=settings),
            ValidationGenerationsLogger(**names),
            self.observers,
        )
        self.verl.validation_generations_logger = self.trackers

        self.recorder = RunRecorder(
            strategy=self.knobs.strategy,
            max_lag=self.schedule.max_lag,
            started_unix=self.runtime.started_unix,
        )
        if self._restored is not None:
            state = self._restored.state
            self.recorder.restore(state.meters["recorder"])
            shards = state.shards_of(checkpoint_contents.TRANSCRIPTS)
            self.prompts.keep(agent_loop_manager.resume(self._restored.folder, shards, self.wait_timeout_s))
        self._restored = None
        self.folder.repeat_rows(self.trackers)

        self.accounts = StepAccountant()
        self._keep_output = self.observers.guard(
            "the output of agents",
            AgentOutputFolder(self.folder.path).add,
            lost=f"without further files in {FOLDER}/",
            attempts=FILE_ATTEMPTS,
        )
        self.generation = self._new_generation(agent_loop_manager)
        self.report = self._new_report()
        self.checkpointing = self._new_checkpointing(agent_loop_manager)
        self.elasticity = self._new_elasticity()

    # Its parts.

    def _new_generation(self, manager: PushAgentLoopManager) -> Generation:
        """Return the part that generates groups through the agent loops of `manager`."""
        return Generation(
            manager=manager,
            prompts=self.prompts,
            calls=self.calls,
            stages=self.stages,
            meters=self.meters,
            bad_data=self.bad_data,
            knobs=self.knobs,
            temperature=self.config.actor_rollout_ref.rollout.temperature,
            filter_metric=self.verl._resolve_filter_groups_metric(),
            reward_workers=lambda: self.verl.reward_loop_manager.reward_loop_workers,
            served=lambda: self.publisher.served,
            note=lambda event, **fields: self._note("generate", event, **fields),
            keep_output=self._keep_output,
        )

    def _new_report(self) -> StepReport:
        """Return the part that finishes steps. The trackers of the run must be open."""
        return StepReport(
            schedule=self.schedule,
            calls=self.calls,
            stages=self.stages,
            publisher=self.publisher,
            meters=self.meters,
            bad_data=self.bad_data,
            accounts=self.accounts,
            observers=self.observers,
            recorder=self.recorder,
            gauges=RayGauges(self.config.trainer.experiment_name),
            trackers=self.trackers,
            steps_per_epoch=self.verl.steps_per_epoch,
            rollout_data_dir=self.config.trainer.get("rollout_data_dir"),
            saves=lambda step: self._flow.checkpoints.saves(step),
            pictures=KeptPictures(self.folder.path) if draws_images(self.config) else None,
        )

    def _devices_of_a_replica(self) -> int:
        """Return the number of devices of one rollout replica."""
        return int(self.config.actor_rollout_ref.rollout.tensor_model_parallel_size)

    def _new_elasticity(self) -> Elasticity:
        """Return the part that adds and removes replicas during the run."""
        devices = self._devices_of_a_replica()
        node = int(self.config.actor_rollout_ref.rollout.n_gpus_per_node)
        return Elasticity(
            self.rollout_pool,
            self.folder.path,
            self.knobs.fleet,
            say,
            self.calls,
            nodes=partial(room_by_node, min(devices, node)),
            nodes_of_a_replica=-(-devices // node),
        )

    def _new_checkpointing(self, manager: PushAgentLoopManager) -> Checkpointing:
        """Return the part that writes checkpoints."""

        def on_save(step: int, folder: str) -> None:
            self.verl.checkpoint_callback.on_save(
                trainer=self.stages.at(step), global_step=step, checkpoint_dir=folder, async_save=False
            )

        critic: Any | None = self.verl.critic_wg if self.verl.use_critic else None
        return Checkpointing(
            run=self.runtime.run,
            identity=self.runtime.identity,
            epoch=self.runtime.epoch,
            config=self.config.trainer,
            schedule=self.schedule,
            calls=self.calls,
            stages=self.stages,
            actor_group=self.verl.actor_rollout_wg,
            critic_group=critic,
            copies=self.log_probs.copies,
            prompts=self.prompts,
            manager=manager,
            bad_data=self.bad_data,
            recorder=self.recorder,
            ledger=self.folder.ledger,
            partition=PARTITION,
            rejects=self.generation.rejects,
            on_save=on_save,
            observers=self.observers,
            patience_s=self.knobs.faults.wait_timeout_s,
            stall_s=self.knobs.faults.checkpoint_stall_s,
        )

    # What the parts report.

    def _note(self, stage: str, event: str, **fields: Any) -> None:
        self._flow.log.append(stage, event, **fields)

    def _note_replica(self, event: str, name: str, version: int | None, **fields: str) -> None:
        known: dict[str, Any] = {} if version is None else {"version": version}
        self._note("param_update", event, replica=name, **known, **fields)

    def _note_size(self, replicas: int) -> None:
        """Note the devices of the pool for generation after a replica has joined or left."""
        pool = self.placement.pool_of("generate")
        assert pool is not None
        devices = replicas * self._devices_of_a_replica()
        self._note("param_update", "RESIZED", pool=pool.name, devices=devices)

    # PipelineTrainer: facts and decisions.

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule of this process; do not read it before the checkpoint is loaded."""
        trainer = self.config.trainer
        by_epochs = self.verl.steps_per_epoch * trainer.total_epochs
        return schedule_of(
            self.knobs,
            strategy=self._schedule_class,
            batch=self.config.data.train_batch_size,
            first_step=1 if self.resumed is None else self.resumed.step + 1,
            last_step=int(min(self.verl.total_training_steps, by_epochs)),
            old_logp=self.runtime.old_logp,
            validate_every=max(0, trainer.test_freq),
            validate_first=bool(trainer.get("val_before_train", True)),
            save_every=max(0, trainer.save_freq),
        )

    @property
    def facts(self) -> Mapping[str, Any]:
        return {"run": self.runtime.run, "unix": round(time.time(), 3), **self.runtime.identity}

    def roles(self) -> Sequence[str]:
        without = set() if self.verl.use_reference_policy else {"ref_logp"}
        without |= set() if self.verl.use_critic else {"values", "critic"}
        without |= set() if self.verl.use_teacher_policy else {"teacher"}
        without |= {"logp"} if self.runtime.old_logp == "update" else set()
        return [role for role in GRAPH if role not in without]

    def pools(self) -> Mapping[str, int]:
        return {pool.name: pool.devices for pool in self.placement.pools}

    def pool_of(self, role: str) -> str | None:
        pool = self.placement.pool_of({"param_update": "train", "values": "critic"}.get(role, role))
        return None if pool is None else pool.name

    def rejects(self, group: Group) -> Literal["filtered", "failed"] | None:
        return self.generation.rejects(group)

    # PipelineTrainer: work.

    async def draw_prompts(self, admission: Admission) -> PromptBatch:
        return await self.generation.draw(admission)

    async def restore_prompts(self, uids: Sequence[str]) -> Sequence[Prompt]:
        """Return the prompts, with the number of tokens that the earlier process has generated for them."""
        return self.prompts.find(uids)

    async def generate_group(self, prompt: Prompt, recall: Recall) -> Group | None:
        return await self.generation.generate(prompt, recall)

    async def ask_teacher(self, group: Group) -> Group:
        return await self.generation.ask_teacher(group)

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
        if self.runtime.old_logp == "update" and not self.stages.is_one_update(batch):
            batch = await self.log_probs.before_update(batch)
        return await self.stages.update_actor(batch)

    async def update_critic(self, batch: StepBatch) -> StepBatch:
        return await self.stages.update_critic(batch)

    async def finish_step(self, batch: StepBatch, facts: Mapping[str, float]) -> float | None:
        if self.stages.is_one_update(batch):
            batch = await self.log_probs.of_update(batch)
        return await self.report.finish(batch, facts)

    async def save(
        self, state: FlowState, *, models_read: Callable[[], object], all_read: Callable[[], object]
    ) -> bool:
        return await self.checkpointing.save(state, models_read=models_read, all_read=all_read)

    async def gather(self, version: int) -> WeightTicket:
        return await self.publisher.gather(version)

    async def publish(self, version: int, snapshot: object) -> Publication:
        assert isinstance(snapshot, WeightTicket)
        return await self.publisher.publish(snapshot)

    def narrowed(self, why: str) -> None:
        say(why)

    def stepped(self, change: Change) -> None:
        say(f"weight updates are now {change.level.name.lower().replace('_', '-')}: {change.why}")

    async def watch(self) -> None:
        watched = (self.rollout_pool, self.teachers, self.report)
        await all_of(*(one.watch() for one in watched), self.elasticity.run())

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
        validated = self.verl.agent_loop_manager.take_validated()
        if validated.failed:
            await self.calls(self._keep_output, version, validated.failed)
        episodes = metrics_of(validated.episodes)
        metrics |= {f"async_pipeline/validation/{name}": value for name, value in episodes.items()}
        seconds = time.perf_counter() - started
        await self.report.log_validation(version, metrics, seconds)
        return seconds


def _events_of(folder: Path, observers: Observers) -> EventFile:
    """Open the file of the run's events, which is an observer: unlike the ledger, the run does without it."""
    name = "events.jsonl"
    return EventFile(
        folder / name,
        on_failure=lambda error: observers.failed(
            name, error, lost="without later events, a trace, a report"
        ),
    )
