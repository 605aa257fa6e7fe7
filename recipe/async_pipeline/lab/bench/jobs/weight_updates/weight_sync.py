# SPDX-License-Identifier: Apache-2.0
"""Update weights while replicas generate, without training: one arm of `async-pipeline bench weight-sync`.

Trainer, workers, engines and managers are the same as in a run; only the trainer's loop differs.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any
from uuid import uuid4

import ray
import torch
import verl.trainer.ppo.v1 as verl_v1
from verl.trainer.main_ppo import TaskRunnerV1

from .....verl_bridge.trainer.pipeline_run import PipelineRun
from .....verl_bridge.trainer.reporting.terminal import say
from .....verl_bridge.trainer.verl_trainer import VerlTrainer
from ...measuring.host_memory import host_memory_bytes
from ...measuring.spans import of_this_job
from ...measuring.stalls import LIMITS, PUBLICATION
from ...weight_sync import limits
from ...weight_sync_jobs import REQUESTS_EACH, VERSIONS, WAYS, WAYS_OF_JOB

FIRST = 1
STEP = 1e-6
"""Largest change of a weight between two versions: what a step of Adam at this learning rate makes."""
BETWEEN_S = (0.5, 1.0)
"""Range of the random pause between two weight updates."""
PROMPT_TOKENS, RESPONSE_TOKENS = 8, 48

_StockRunner: Any = TaskRunnerV1.__ray_metadata__.modified_class.__ray_actor_class__
"""The plain class of verl's actor class, which Ray forbids to inherit from."""


Publish = Callable[[int], Awaitable[dict[str, float]]]
"""Updates the weights of all replicas to a version; returns the costs."""


def publishing(trainer: Any) -> Any:
    """Return a subclass of a trainer whose run consists of weight updates."""

    class Publishing(trainer):  # type: ignore[misc]
        run_class = _Run

        def fit(self, agent_loop_manager: Any) -> None:
            """Update weights in place of training."""
            del agent_loop_manager
            pipeline = issubclass(trainer, VerlTrainer)
            publish = _publish_pipeline if pipeline else _publish_stock
            ways = {name: partial(publish, self, name) for name in os.environ[WAYS_OF_JOB].split(",")}
            manager = None if pipeline else self.standalone_server_manager
            replicas = manager.get_replicas() if manager else self.pipeline.rollout_pool.replicas
            servers = [replica.servers[0] for replica in replicas]
            asyncio.run(_run(self.actor_rollout_wg.workers, ways, servers))

    return Publishing


class _Run(PipelineRun):
    def _note(self, stage: str, event: str, **fields: Any) -> None:
        """Print what becomes of a replica: without a flow there is no event log."""
        say(f"{stage}: {event} {fields}")


async def _run(workers: Sequence[Any], ways: Mapping[str, Publish], servers: Sequence[Any]) -> None:
    """Update the weights in each way, in turns, while all servers have requests."""
    rng, meters = random.Random(0), _meters()
    # verl's trainer has already published version 0.
    await next(iter(ways.values()))(FIRST)

    stop = asyncio.Event()
    clients = [
        asyncio.create_task(_send_requests(server, stop))
        for server in servers
        for _ in range(int(os.environ[REQUESTS_EACH]))
    ]

    turns = [way for _ in range(int(os.environ[VERSIONS])) for way in ways]
    for version, way in enumerate(turns, start=FIRST + 1):
        await asyncio.gather(*(worker.__ray_call__.remote(take_step) for worker in workers))
        await asyncio.sleep(rng.uniform(*BETWEEN_S))
        started = time.monotonic()
        facts = await ways[way](version)
        ended = time.monotonic()
        held = await asyncio.gather(*(meter.shm_bytes.remote() for meter in meters))
        of_this_job().add(PUBLICATION, started, ended, way=way, shm_bytes=max(held), **facts)

    await asyncio.sleep(BETWEEN_S[1])
    started = time.monotonic()
    of_this_job().add(LIMITS, started, **await asyncio.to_thread(limits))
    stop.set()
    await asyncio.gather(*clients)


class HostMeter:
    """An actor on a host that measures the memory of weight updates there."""

    def shm_bytes(self) -> int:
        """Return the bytes that all segments occupy in shared memory of this host."""
        return host_memory_bytes()


def _meters() -> list[Any]:
    """Start a meter on each host."""
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    return [
        ray.remote(HostMeter)
        .options(num_cpus=0, scheduling_strategy=strategy(node["NodeID"], soft=False))
        .remote()
        for node in ray.nodes()
        if node["Alive"]
    ]


def take_step(worker: Any) -> None:
    """Change all weights of a training worker by about as much as a step does."""
    for one in getattr(worker, "worker_dict", {"": worker}).values():
        with torch.no_grad():
            for parameter in one.actor.engine.module.parameters():
                held = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                held.add_(torch.empty_like(held).uniform_(-STEP, STEP))


async def _send_requests(server: Any, stop: asyncio.Event) -> None:
    while not stop.is_set():
        await server.generate.remote(
            prompt_ids=list(range(3, 3 + PROMPT_TOKENS)),
            sampling_params={"temperature": 1.0, "max_tokens": RESPONSE_TOKENS, "ignore_eos": True},
            request_id=uuid4().hex,
        )


async def _publish_pipeline(trainer: Any, way: str, version: int) -> dict[str, float]:
    pool = trainer.pipeline.rollout_pool
    pool.how = pool.how._replace(stage=WAYS[way].stage)
    started = time.monotonic()
    ticket = await trainer.pipeline.gather(version)
    gathered = time.monotonic()
    publication = await pool.publish(ticket)
    return {
        "trainer_stall": gathered - started,
        "bytes": publication.num_bytes,
        "replicas": publication.replicas,
        "gather_s": publication.gather_s,
        "transfer_s": publication.transfer_s,
        "load_s": publication.load_s,
        "commit_s": publication.commit_s,
        "stall_s": publication.stall_s,
        "prove_s": publication.prove_s,
        "tokens_read_again": publication.tokens_read_again,
    }


async def _publish_stock(trainer: Any, way: str, version: int) -> dict[str, float]:
    started = time.monotonic()
    await asyncio.to_thread(trainer.standalone_checkpoint_manager.update_weights, global_steps=version)
    return {"trainer_stall": time.monotonic() - started}


class SyncTaskRunner(_StockRunner):  # type: ignore[misc]
    """verl's task runner with a trainer that only updates weights."""

    def run(self, config: Any) -> None:
        """Run verl's task with a trainer that only updates weights."""
        if config.actor_rollout_ref.rollout.name == "sglang":
            from .sglang_replicas import use_timed

            use_timed()
        lookup = verl_v1.get_trainer_cls
        verl_v1.get_trainer_cls = lambda mode: publishing(lookup(mode))
        super().run(config)
