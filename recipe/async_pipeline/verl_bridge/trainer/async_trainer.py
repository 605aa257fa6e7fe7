# SPDX-License-Identifier: Apache-2.0
"""verl's V1 PPOTrainer as the executor of the pipeline.

`fit` runs `AsyncTrainingFlow`; the roles call the coroutines below. Each of them runs verl's own
blocking code in a thread, on a copy of the batch's metadata, because verl's stages write into it.
Decisions about order and age are in its `schedule`.
"""

from __future__ import annotations

import asyncio
import copy
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any, Literal, TypeVar

import ray
import transfer_queue as tq
import xxhash
from omegaconf import DictConfig, OmegaConf
from transfer_queue import KVBatchMeta
from verl.single_controller.ray import RayWorkerGroup
from verl.trainer.ppo.utils import Role
from verl.utils.device import get_device_name
from verl.utils.tracking import Tracking, ValidationGenerationsLogger
from verl.workers.rollout.llm_server import LLMServerClient

from ...config.settings_file import as_settings
from ...core.bad_data import BadData, Verdict
from ...core.clock import within
from ...core.degradation import Caution, Change
from ...core.diagnosis import diagnose
from ...core.flow import GRAPH, AsyncTrainingFlow
from ...core.items import Group, Prompt, Publication, StepBatch, Trajectory
from ...core.wait_graph import Wait, waits_of
from ...errors import PatchedVerlRequired, RolloutError
from ...observe.event_file import EventFile
from ...observe.overlap import OverlapMeter
from ...observe.step_account import StepAccountant
from ...observe.summary import RunRecorder, write_atomically
from ...observe.table import StepRow, closing, header, progress
from ...observe.trace import leave_trace
from ...observe.watchdog import Watchdog
from ...patching.patched_tree import require_patched
from ...patching.verl_source import find_verl_root
from ...redaction import redacted
from ...stages.custom import insert_custom_roles
from ...weight_sync.manifest import Ticket
from ...weight_sync.versioned_engine import LoadMode
from .. import checkpoint_engine as _checkpoint_engine  # noqa: F401 - registers `dual_buffer`
from .. import plugin
from ..agent_loop.manager import PushAgentLoopManager
from ..agent_loop.version_spans import cost_columns
from ..agent_loop.worker import Details
from ..interrupts import until_cancelled
from ..ray_calls import result_of
from ..reward.batch_scoring import score_batch
from ..reward.worker_manager import install as install_reward_workers
from ..rollout.replica_pool import RolloutPool
from ..rollout.server_manager import ColocatedLoadBalancer, PipelineServerManager, devices_of_a_node
from ..run_config import knobs_of
from ..workers.log_prob_group import start_group
from ..workers.training_worker import PipelineCritic, PipelineWorker
from .checkpointing import PARTITION
from .insight_spans import InsightStates
from .insight_spans import is_enabled as is_insight_enabled
from .log_probs import LogProbTrainer, own_copy, verls_name
from .ray_metrics import RayGauges
from .sample_metrics import SampleMeters
from .terminal import echo as _echo
from .terminal import say as _say

T = TypeVar("T")
KEPT_RECORDS = 10_000
"""Events kept in memory; `events.jsonl` has them all."""
SHOWN_REPLICAS = 16
"""The versions of so many replicas are metrics of their own; of more, the oldest alone."""
START_S = 1800.0
"""Seconds that engines and models get to start at least, however short the waits of a run that has started
are to be.
"""
CLOSE_S = 5.0
"""Seconds that the workers get to unlink their shared memory at the end."""
TRACE_S = 60.0
"""Seconds that the trace of the run may take; `async-pipeline report` writes it later otherwise."""
VALIDATION_POLL_S = 0.05
"""verl polls the sample store during validation, by default every 2 s."""


class AsyncPipelineTrainer(LogProbTrainer):
    """Base of the strategies. Not registered itself."""

    _enable_hybrid_replicas = False
    """verl reads this: no rollout engine on the training devices."""
    _flow: AsyncTrainingFlow

    def __init__(self, config: DictConfig) -> None:
        """Raises PatchedVerlRequired: the worker's verl lacks our plugin or patches."""
        if not plugin.is_loaded():
            raise PatchedVerlRequired("verl did not load our plugin; run `pip install -e .` here, then retry")
        require_patched(find_verl_root())
        install_reward_workers()
        ColocatedLoadBalancer.use()
        super().__init__(config)
        self.started_unix = self.runtime.started_unix
        self.knobs = knobs = knobs_of(config)
        self.placement = self.runtime.placement
        faults = knobs.faults
        self.caution = Caution(after=faults.degrade_after_failures, clean=faults.restore_after_successes)
        self.wait_timeout_s: float | None = faults.wait_timeout_s
        self.run_dir = self.runtime.run_dir
        self.replay_buffer.poll_interval = VALIDATION_POLL_S
        self._filter_metric = self._resolve_filter_groups_metric()
        self._meters = SampleMeters(config, knobs.staleness.max_lag)
        policies = faults.bad_data.by_kind(knobs.reward.failure)
        self._bad_data = BadData(policies, faults.max_prompt_attempts, _say)
        self._last_publication: Publication | None = None
        self._tickets = {}
        self._may_generate = asyncio.Event()
        self._may_generate.set()
        self._copies = {}
        self._last_finish = 0.0
        self._logged = 0
        """The newest step whose metrics the trackers have."""

    # Start-up.

    _logp_group: Future[RayWorkerGroup] | None = None
    """Of a pool for logp alone, or with ref_logp."""

    def _setup(self) -> None:
        """Training workers and rollout servers start side by side: neither needs the other."""
        _say("starting training workers and rollout servers")
        super()._setup()
        _say("training workers are up")
        self._server_manager.attach(self.llm_server_manager.global_load_balancer)
        PushAgentLoopManager.start_early(
            config=self.config,
            llm_client=self.get_llm_client(),
            teacher_client=None,
            reward_loop_worker_handles=self.get_reward_handles(),
        )
        faults, sync = self.knobs.faults, self.knobs.weight_sync
        start_s = max(START_S, faults.wait_timeout_s)
        self._server_manager.ready(start_s)
        (trainer_node,) = self._nodes_of(self.actor_rollout_wg.workers[:1])
        rollout = self.config.actor_rollout_ref.rollout
        self.rollout_pool = RolloutPool(
            self._server_manager,
            _say,
            trainer_node=trainer_node,
            piece_bytes=sync.load_bucket_size_mb << 20,
            load_timeout_s=sync.timeout_s,
            restart_timeout_s=faults.wait_timeout_s,
            how=LoadMode(sync.in_flight_policy, sync.load_staging, sync.reuse_prefixes),
            max_concurrent_loads=sync.max_concurrent_loads,
            note=self._note_replica,
        )
        if self._logp_group is not None:
            group = result_of(
                self._logp_group, start_s, owner="the trainer", what="the workers of logp to start"
            )
            self._copies["logp"] = self._policy_copy("logp", group)
        if self.knobs.training.ref_refresh_every:
            self._copies["ref_logp"] = self._policy_copy("ref_logp", self.ref_policy_wg)
            self._load_reference()
        _say(f"{len(self.rollout_pool.replicas)} rollout replica(s) are up ({rollout.name})")

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role, worker in (
            (Role.Actor, PipelineWorker),
            (Role.RefPolicy, PipelineWorker),
            (Role.Critic, PipelineCritic),
        ):
            if role in self.role_worker_mapping:
                self.role_worker_mapping[role] = ray.remote(worker)
        pools = self.resource_pool_manager
        for pool in self.placement.pools:
            if "train" in pool.roles or "generate" in pool.roles:
                continue
            pools.resource_pool_spec[verls_name(pool)] = list(pool.per_node)
            for role, verls in (("ref_logp", Role.RefPolicy), ("critic", Role.Critic)):
                if role in pool.roles:
                    pools.mapping[verls] = verls_name(pool)
        create = pools.create_resource_pool

        def reserve() -> None:
            """The training devices of a node have to be together, so they are reserved before replicas
            take any.
            """
            create()
            for pool in pools.resource_pool_dict.values():
                pool.get_placement_groups(device_name=get_device_name())
            own = self.placement.own_pool_of("logp")
            if own is not None:
                self._logp_group = self._threads.submit(
                    start_group, "logp", pools.resource_pool_dict[verls_name(own)], copy.deepcopy(self.config)
                )
            self._server_manager = PipelineServerManager.started(self.config)

        pools.create_resource_pool = reserve

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        """As verl's, for the devices of other pools as well."""
        others = [
            pool.devices
            for role in ("logp", "ref_logp", "critic")
            if (pool := self.placement.own_pool_of(role))
        ]
        return math.lcm(super()._get_required_batch_multiple(dp_size), *others)

    def get_llm_client(self) -> LLMServerClient:
        return self._server_manager.get_client()

    def on_step_end(self) -> None:
        """verl's serial loop is not used."""

    def on_sample_end(self) -> None:
        """verl's serial loop is not used."""

    def _get_n_gpus_for_throughput(self) -> int:
        return sum(self.pools().values())

    # The run.

    def fit(self, agent_loop_manager: Any) -> None:
        """Train to the end. Raises the first error of any role, after the summary was written."""
        self.agent_loop_manager = agent_loop_manager
        self._open_run()
        try:
            asyncio.run(until_cancelled(self._run()))
        finally:
            # Also after a failure, but without waiting for a worker that may be stuck.
            trace = self._threads.submit(leave_trace, self.run_dir, _say)
            wait([self._threads.submit(self.actor_rollout_wg.close_arenas)], timeout=CLOSE_S)
            wait([trace], timeout=TRACE_S)
            self._threads.shutdown(wait=False, cancel_futures=True)
        self._shutdown_dump_executor()

    def _open_run(self) -> None:
        """Make the run's directory, and what writes there; what another process made of its end is not of
        this run.
        """
        self._open_files()
        for left in ("summary.json", "trace.json", "report.html"):
            (self.run_dir / left).unlink(missing_ok=True)
        settings = redacted(OmegaConf.to_container(self.config, resolve=True))
        write_atomically(self.run_dir / "config.json", settings, unknown=str)
        trainer = self.config.trainer
        self.logger = Tracking(
            project_name=trainer.project_name,
            experiment_name=trainer.experiment_name,
            default_backend=trainer.logger,
            config=settings,
        )
        self.validation_generations_logger = ValidationGenerationsLogger(
            project_name=trainer.project_name, experiment_name=trainer.experiment_name
        )
        self._accounts = StepAccountant()
        self._gauges = RayGauges(trainer.experiment_name)
        write_atomically(self.run_dir / "settings.json", self._settings())
        self.recorder = RunRecorder(
            strategy=self.knobs.strategy, max_lag=self.schedule.max_lag, started_unix=self.started_unix
        )
        self._repeat_rows()

    def _settings(self) -> dict[str, Any]:
        """What the run was told, as far as its speed depends on it; a profile is made of it and of the
        event log.
        """
        rollout = self.config.actor_rollout_ref.rollout
        return {
            **as_settings(self.knobs, self.runtime.old_logp),
            "placement": self.placement.as_list(),
            "groups": self.config.data.train_batch_size,
            "answers": rollout.n,
            "devices_per_replica": rollout.tensor_model_parallel_size,
            "devices_per_node": devices_of_a_node(self.placement),
            "slots": rollout.max_num_seqs,
        }

    async def _run(self) -> None:
        flow = self._flow = AsyncTrainingFlow(
            trainer=self,
            enable_async_rl=True,
            keep_records=KEPT_RECORDS,
            startup_s=lambda: max(0.0, time.time() - self.started_unix),
        )
        insert_custom_roles(flow.graph, self.knobs.custom_stages)
        overlap = OverlapMeter()
        flow.log.subscribe(overlap)
        flow.log.subscribe(self._accounts)
        if is_insight_enabled():
            flow.log.subscribe(InsightStates(self._threads.submit))
        failure: BaseException | None = None
        watchdog = Watchdog(
            self.run_dir / "diagnosis.txt", stalled_after_s=self.knobs.faults.loop_stall_s, say=_say
        )

        def expired(wait: Wait) -> str:
            diagnosis = diagnose(flow, wait)
            watchdog.tell(diagnosis)
            return diagnosis.cause

        waits_of().on_expiry = expired
        with EventFile(self.run_dir / "events.jsonl") as events, self._ledger as ledger, watchdog:
            flow.log.subscribe(events)
            flow.ledger.subscribe(ledger)
            flow.fates.subscribe(self.prompts.settled)
            flow.fates.subscribe(self._meters.settled)
            schedule = self.schedule
            steps = f"{schedule.first_step}..{schedule.last_step}"
            _say(f"{self.knobs.strategy}, max_lag {schedule.max_lag}, steps {steps}")
            _echo(header())
            self._last_finish = time.perf_counter()
            try:
                await flow.run()
                await self._call(ledger.sync)
            except BaseException as error:
                failure = error
                raise
            finally:
                await self.rollout_pool.close()
                summary = self.recorder.summarize(flow.result(), overlap.seconds, time.time(), failure)
                summary |= self._accounts.summary()
                summary["bad_data"] = self._bad_data.summary()
                write_atomically(self.run_dir / "summary.json", summary)
                for line in closing(summary):
                    _echo(line)

    # PipelineTrainer: facts and decisions.

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
        """A group whose data is bad; and by DAPO's rule (arXiv 2503.14476) one whose answers are
        all alike, and have no advantage over each other.
        """
        if group.flaw:
            return "failed"
        alike = len({t.filter_by for t in group.trajectories}) == 1
        return (
            "filtered" if self._filter_metric is not None and alike and len(group.trajectories) > 1 else None
        )

    # PipelineTrainer: work.

    async def generate_group(self, prompt: Prompt) -> Group:
        await within(
            self._may_generate.wait(), self.wait_timeout_s, owner="generate", what="validation to end"
        )
        identity = _identity(prompt)
        refused = self._bad_data.refuse(identity)
        if refused is not None:
            return _group(prompt, (), refused)
        started = time.perf_counter()
        try:
            answered = await self.agent_loop_manager.run_group(self.prompts.begin(prompt))
        except asyncio.CancelledError:
            self._meters.cancelled(time.perf_counter() - started)
            raise
        seconds = time.perf_counter() - started
        self._flow.log.append(
            "generate",
            "ANSWERED",
            key=prompt.uid,
            seconds=round(seconds, 6),
            **cost_columns([details.cost for details in answered.details]),
        )
        pairs = sorted(
            zip(answered.trajectories, answered.details, strict=True), key=lambda pair: pair[0].key
        )
        trajectories = tuple(
            replace(one, seconds=seconds, filter_by=self._filter_by(one, details)) for one, details in pairs
        )
        self._meters.finished(prompt.uid, trajectories)
        verdict = self._bad_data.judge(prompt.uid, identity, answered.flaws)
        columns = [details.columns for _, details in pairs]
        alike = all(one == columns[0] for one in columns)
        return _group(prompt, trajectories, verdict, columns[:1] if alike else columns)

    def _filter_by(self, trajectory: Trajectory, details: Details) -> float | None:
        """Raises RolloutError: the reward function did not say what groups are to be filtered by."""
        metric = self._filter_metric
        if metric is None:
            return None
        value = trajectory.reward if metric == "reward" else details.reward_info.get(metric)
        if value is None:
            known = ", ".join(["reward", *details.reward_info])
            raise RolloutError(
                "algorithm.filter_groups.metric must be something that the reward function returns, got "
                f"{metric!r}; choose one of {known}"
            )
        return float(value)

    async def discard(self, group: Group) -> None:
        self._meters.discarded(group.uid)
        if group.flaw:  # the agent loop has not stored it
            return
        await self._call(tq.kv_clear, keys=[t.key for t in group.trajectories], partition_id=PARTITION)

    async def assemble(self, step: int, groups: Sequence[Group]) -> StepBatch:
        ordered = tuple(sorted(groups, key=lambda g: self.prompts.place(g.uid)))
        metrics: dict[str, Any] = {}
        meta = KVBatchMeta(
            partition_id=PARTITION,
            keys=[t.key for g in ordered for t in g.trajectories],
            tags=[dict(t.payload) for g in ordered for t in g.trajectories],
            extra_info={"temperature": self.config.actor_rollout_ref.rollout.temperature},
        )
        timing = {}
        if not self.knobs.reward.while_generating:
            started = time.perf_counter()
            ordered = await self._score(ordered, meta)
            timing["reward"] = time.perf_counter() - started
        meta = await self._call(self._balance_batch, meta, metrics=metrics)
        return StepBatch(step=step, groups=ordered, payload=meta, metrics=metrics, timing_s=timing)

    async def _score(self, groups: Sequence[Group], meta: KVBatchMeta) -> tuple[Group, ...]:
        """The groups with the rewards that they get only now."""
        workers = self.reward_loop_manager.reward_loop_workers
        results = iter(await self._call(score_batch, workers, own_copy(meta), self.knobs))
        return tuple(
            replace(
                group,
                trajectories=tuple(
                    replace(t, reward=float(next(results)["reward_score"])) for t in group.trajectories
                ),
            )
            for group in groups
        )

    async def compute_values(self, batch: StepBatch) -> StepBatch:
        return await self._on_workers(batch, self._compute_values, "values")

    async def update_critic(self, batch: StepBatch) -> StepBatch:
        return await self._on_workers(batch, self._update_critic, "update_critic")

    async def compute_advantages(self, batch: StepBatch) -> StepBatch:
        return await self._stage(batch, self._compute_advantage, "adv")

    async def update(self, batch: StepBatch) -> StepBatch:
        self.global_steps = step = batch.step
        if step >= self.config.trainer.critic_warmup:
            batch = await self._on_workers(batch, self._update_actor, "update_actor")
        return batch

    async def finish_step(self, batch: StepBatch, facts: Mapping[str, float]) -> None:
        now = time.perf_counter()
        step_s, self._last_finish = now - self._last_finish, now
        found, warning = self._meters.selection()
        if warning is not None:
            _say(warning)
        found |= self._accounts.take()
        await self._call(self._finish, batch, {**facts, **found}, step_s, self._accounts.critical_role())

    def _finish(self, batch: StepBatch, facts: dict[str, float], step_s: float, critical: str) -> None:
        timing = {**batch.timing_s, "step": step_s}
        metrics = {**batch.metrics, **{f"async_pipeline/{k}": v for k, v in facts.items()}}
        metrics.update({f"async_pipeline/{name}": value for name, value in self._bad_data.metrics().items()})
        metrics.update(self._publication_metrics())
        served = self.rollout_pool.versions
        metrics["async_pipeline/version/replicas"] = len(served)
        if len(served) <= SHOWN_REPLICAS:
            metrics.update(
                {f"async_pipeline/version/{name.replace(' ', '_')}": v for name, v in served.items()}
            )
        for role, version in (
            ("old_logp", self.schedule.old_policy(batch.step)),
            ("ref_logp", self.schedule.reference(batch.step)),
        ):
            if version is not None:
                metrics[f"async_pipeline/version/{role}"] = version
        metrics.update({f"async_pipeline/{k}": v for k, v in self._meters.distances(batch).items()})
        self._compute_metrics(
            own_copy(batch.payload),
            metrics,
            timing,
            global_steps=batch.step,
            epoch=(batch.step - 1) // self.steps_per_epoch,
        )
        if self.config.trainer.get("rollout_data_dir"):
            self.global_steps = batch.step
            self._log_rollout_data(own_copy(batch.payload), timing, self.config.trainer.rollout_data_dir)
        tq.kv_clear(keys=batch.payload.keys, partition_id=batch.payload.partition_id)
        self._report(batch, facts, metrics, step_s, critical)
        self._gauges.show(metrics)
        self._logged = batch.step
        self.logger.log(data=metrics, step=batch.step)

    def _report(
        self,
        batch: StepBatch,
        facts: Mapping[str, float],
        metrics: Mapping[str, Any],
        step_s: float,
        critical: str,
    ) -> None:
        trajectories = [t for g in batch.groups for t in g.trajectories]
        reward = sum(t.reward or 0.0 for t in trajectories) / len(trajectories)
        kl = metrics.get("rollout_corr/kl")
        self.recorder.record(reward, step_s, None if kl is None else float(kl), time.time())
        row = StepRow(
            step=batch.step,
            last_step=self.schedule.last_step,
            reward=reward,
            tokens=sum(t.num_tokens for t in trajectories) / len(trajectories),
            lag_mean=facts["lag/mean"],
            lag_max=facts["lag/max"],
            served=facts["version/served_min"],
            kl=float("nan") if kl is None else float(kl),
            train_s=batch.timing_s.get("update_actor", 0.0),
            step_s=step_s,
            samples=len(trajectories),
        )
        _echo(row.render())
        _echo(
            progress(
                row,
                untrained=facts["queue/untrained"],
                finished=facts["queue/finished"],
                critical=critical,
            )
        )

    def _publication_metrics(self) -> dict[str, float]:
        """The newest publication, with the metrics of the step during which it happened."""
        last = self._last_publication
        if last is None:
            return {}
        names = (
            "version",
            "num_bytes",
            "gather_s",
            "transfer_s",
            "load_s",
            "stall_s",
            "tensors_proved",
            "tokens_read_again",
        )
        return {f"async_pipeline/param_update/{name}": float(getattr(last, name)) for name in names}

    def stepped(self, change: Change) -> None:
        _say(f"weight updates are {change.level.name.lower().replace('_', '-')} from here on: {change.why}")

    async def publish(self, version: int, snapshot: object) -> Publication:
        assert isinstance(snapshot, Ticket)
        self._last_publication = await self.rollout_pool.publish(snapshot)
        return self._last_publication

    async def watch(self) -> None:
        await self.rollout_pool.watch()

    def _note_replica(self, event: str, name: str, version: int | None) -> None:
        fields: dict[str, Any] = {} if version is None else {"version": version}
        self._flow.log.append("param_update", event, replica=name, **fields)

    async def validate(self, version: int) -> float | None:
        """Validate a version that was just served, if it is due. Replicas keep it until this is done."""
        if not self.schedule.validates(version):
            return None
        if self.knobs.validation == "pause":
            self._may_generate.clear()
        try:
            async with self.rollout_pool.weights("validation"):
                started = time.perf_counter()
                metrics = await self._call(self._validate)
        finally:
            self._may_generate.set()
        seconds = time.perf_counter() - started
        metrics["async_pipeline/validation/version"] = version
        # A tracker may drop what comes after a later step; whose metrics these are, their own key says.
        await self._call(self.logger.log, data=metrics, step=max(version, self._logged))
        shown = {k: round(float(v), 4) for k, v in metrics.items() if k.startswith("val-core")}
        _say(f"validation of version {version}: {shown} in {seconds:.1f} s")
        return seconds


def _identity(prompt: Prompt) -> str:
    """The same for the same prompt, in whichever epoch it is drawn."""
    return xxhash.xxh3_128_hexdigest(str(prompt.payload["raw_prompt"][0]).encode())


def _group(
    prompt: Prompt,
    trajectories: tuple[Trajectory, ...],
    verdict: Verdict | None,
    columns: Sequence[Sequence[str]] = (),
) -> Group:
    flaw, again = verdict or ("", False)
    return Group(
        uid=prompt.uid, step=prompt.step, trajectories=trajectories, flaw=flaw, again=again, payload=columns
    )
