# SPDX-License-Identifier: Apache-2.0
"""Run the whole pipeline with engines and training that cost nothing: `async-pipeline bench control-plane`.

It uses the flow, generation, agent loops, rewards, sample store, weight updates and bookkeeping of a run.
Left out are the training workers and verl's work on the tensors of a batch: log-probs, advantages, the
optimizer step and metrics. The engine is `idle_engine.IdleServer`.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import time
from pathlib import Path
from typing import Any, ClassVar

import psutil
import ray
import transfer_queue as tq
import verl.trainer.ppo.v1 as verl_v1
from verl.trainer.main_ppo import TaskRunnerV1
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.workers.rollout.replica import RolloutReplica

from ....core.groups.items import Publication, StepBatch
from ....core.schedule import Schedule
from ....verl_bridge.calls.control_calls import server_actor
from ....verl_bridge.calls.direct_calls import DirectCaller
from ....verl_bridge.rollout.server_manager import PipelineServerManager
from ....verl_bridge.rollout.standalone_replica import BoundedReplica
from ....verl_bridge.store.sample_columns import PARTITION
from ....verl_bridge.trainer.pipeline_run import PipelineRun
from ....verl_bridge.trainer.reporting.sample_metrics import SampleMeters
from ....verl_bridge.trainer.verl_trainer import VerlTrainer
from ....weight_sync.memory.manifest import WeightTicket
from ..control_plane import CHECK, END, ENGINE, LOOP, SERVED, TRAINED
from ..inputs.waits import LognormalWait
from ..measuring.loop_lag import LagMeter
from ..measuring.spans import of_this_job
from .idle_engine import IdleServer

CHECK_EVERY_S = 0.2
"""Seconds between two calls of `check` on a replica, after the reply to the first."""
COLLECTIONS = 20
"""Measurements of the memory during a run, each after a garbage collection."""

_StockRunner: Any = TaskRunnerV1.__ray_metadata__.modified_class.__ray_actor_class__
"""The plain class of verl's actor class, which Ray forbids to inherit from."""


class IdleReplica(BoundedReplica, RolloutReplica):  # type: ignore[misc]
    """A replica of one `IdleServer`, without devices."""

    def __init__(self, *args: Any, turn: object, **kwargs: Any) -> None:
        """`turn`: see `StandaloneReplica`; without devices there is nothing to wait for."""
        super().__init__(*args, **kwargs)

    async def init_standalone(self) -> None:
        """Start the server."""
        await self.launch_servers()

    async def launch_servers(self) -> None:
        described = json.loads(os.environ[ENGINE])
        server = (
            server_actor(IdleServer)
            .options(max_concurrency=self.max_concurrency, num_cpus=0)
            .remote(
                self.replica_rank,
                described["seed"],
                LognormalWait(**described["answer_s"]),
                described.get("tokens"),
            )
        )
        self.servers, self._server_handle = [server], server
        self._server_address = f"idle:{self.replica_rank}"

    async def restart(self) -> None:
        """Start a new server."""
        ray.kill(self._server_handle)
        await self.launch_servers()


class _Here:
    """Stands for a training worker; calls run in this process."""

    @property
    def __ray_call__(self) -> _Here:
        return self

    def remote(self, function: Any) -> Any:
        return ray.put(function(None))


class _NoWorkers:
    """Stands for the training workers."""

    workers = (_Here(),)

    def __init__(self) -> None:
        self._dispatch_info = {"actor": [0]}

    def gather_weights(self, version: int) -> list[WeightTicket]:
        host = ray.get_runtime_context().get_node_id()
        return [
            WeightTicket(version=version, board="", pid=os.getpid(), num_bytes=0, gather_s=0.0, host=host)
        ]

    def save_checkpoint(self, folder: str, *_: object, **__: object) -> None:
        """Write an empty file in place of a model."""
        Path(folder).mkdir(parents=True)
        (Path(folder) / "model_world_size_1_rank_0.pt").touch()

    def close_arenas(self) -> None:
        """Do nothing: there are none."""


class _WithoutWorkers(PPOTrainer):  # type: ignore[misc]
    """verl's start-up without training workers."""

    def _setup(self) -> None:
        self._init_tokenizer()
        self._init_dataloader()
        self._init_dump_executor()
        self._init_resource_pool_mgr()
        self.actor_rollout_wg, self.teacher_model_manager = _NoWorkers(), None
        self.pipeline.startup.servers = PipelineServerManager.started(self.config)
        self.reward_loop_manager = trainer_base.RewardLoopManager(config=self.config, rm_resource_pool=None)
        self.llm_server_manager = trainer_base.LLMServerManager.create_empty(config=self.config)
        self._load_checkpoint()


class _Meters(SampleMeters):
    def distances(self, batch: StepBatch) -> tuple[dict[str, float], str | None]:
        """Return nothing: there are no old log-probs."""
        return {}, None


class IdleRun(PipelineRun):
    """A run without the work on devices and on tensors."""

    def __init__(self, verl: Any, schedule_class: type[Schedule] | None = None) -> None:
        super().__init__(verl, schedule_class)
        self.meters = _Meters(self.config, self.knobs.staleness.max_lag)
        self._memory = psutil.Process()

    async def compute_log_probs(self, batch: StepBatch) -> StepBatch:
        return batch

    async def compute_advantages(self, batch: StepBatch) -> StepBatch:
        return batch

    async def update(self, batch: StepBatch) -> StepBatch:
        return batch

    async def publish(self, version: int, snapshot: object) -> Publication:
        """Record a span for each weight update."""
        with of_this_job().measure(SERVED, version=version):
            return await super().publish(version, snapshot)

    async def finish_step(self, batch: StepBatch, facts: Any) -> None:
        """Record a span for each finished step, with the private memory of this process now and then."""
        started = time.monotonic()
        await super().finish_step(batch, facts)
        found: dict[str, Any] = {"step": batch.step, "trajectories": batch.num_trajectories}
        if batch.step % max(1, self.schedule.last_step // COLLECTIONS) == 0:
            gc.collect()
            memory = self._memory.memory_info()
            found["private_bytes"] = memory.rss - memory.shared
        of_this_job().add(TRAINED, started, **found)

    async def watch(self) -> None:
        """Also measure the lag of this event loop, and the latency of control calls."""
        lag, calls = LagMeter(), [self._check(replica) for replica in self.rollout_pool.replicas]
        try:
            await asyncio.gather(super().watch(), lag.run(), *calls)
        finally:
            of_this_job().add(LOOP, time.monotonic(), **lag.summary())

    async def _check(self, replica: Any) -> None:
        caller = DirectCaller(replica.servers[0])  # as the replica pool does
        while True:
            with of_this_job().measure(CHECK):
                await caller.call("check")
            await asyncio.sleep(CHECK_EVERY_S)


class IdleTrainer(VerlTrainer, _WithoutWorkers):
    """verl's trainer of such a run."""

    run_class = IdleRun

    def _compute_metrics(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: verl computes metrics of the tensors here."""

    def fit(self, agent_loop_manager: Any) -> None:
        """Run, then record how many requests each server had at most, and the samples that were not freed."""
        # Their start is not measured, so it must be over.
        started = [*agent_loop_manager.agent_loop_workers, *self.reward_loop_manager.reward_loop_workers]
        ray.get([worker.__ray_call__.remote(_nothing) for worker in started])
        super().fit(agent_loop_manager)
        servers = [replica.servers[0] for replica in self.pipeline.rollout_pool.replicas]
        most = ray.get([server.most_open_requests.remote() for server in servers])
        left = len((tq.kv_list(PARTITION) or {}).get(PARTITION, {}))
        of_this_job().add(END, time.monotonic(), most_open_requests=most, left_in_store=left)


def _nothing(actor: Any) -> None:
    """Do nothing, in the process of an actor that has started."""


class IdleTaskRunner(_StockRunner):  # type: ignore[misc]
    """verl's task runner with a trainer and replicas that cost nothing."""

    trainer_class: ClassVar[type[IdleTrainer]] = IdleTrainer

    def run(self, config: Any) -> None:
        """Run verl's task with them."""
        PipelineServerManager.rollout_replica_class = IdleReplica
        verl_v1.get_trainer_cls = lambda mode: self.trainer_class
        super().run(config)
