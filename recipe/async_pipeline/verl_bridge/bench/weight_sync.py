# SPDX-License-Identifier: Apache-2.0
"""Update weights while replicas generate, without training: one arm of `async-pipeline bench weight-sync`.

Trainer, workers, engines and managers are the same as in a run; only the trainer's loop differs.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import verl.trainer.ppo.v1 as verl_v1
from verl.trainer.main_ppo import TaskRunnerV1

from ...bench.spans import of_this_job
from ...bench.stalls import LIMITS, PUBLICATION
from ...bench.weight_sync import limits
from ..trainer.async_trainer import AsyncPipelineTrainer

VERSIONS, REQUESTS = "ASYNC_PIPELINE_BENCH_VERSIONS", "ASYNC_PIPELINE_BENCH_REQUESTS"
"""Environment variables: the number of weight updates, and of requests in flight on each replica."""
FIRST = 1
BETWEEN_S = (0.5, 1.0)
"""Range of the random pause between two weight updates."""
PROMPT_TOKENS, RESPONSE_TOKENS = 8, 48

_StockRunner: Any = TaskRunnerV1.__ray_metadata__.modified_class.__ray_actor_class__
"""The plain class of verl's actor class, which Ray forbids to inherit from."""


def publishing(trainer: Any) -> Any:
    """Return a subclass of a trainer whose run consists of weight updates."""

    class Publishing(trainer):  # type: ignore[misc]
        def fit(self, agent_loop_manager: Any) -> None:
            """Update weights in place of training."""
            del agent_loop_manager
            publish = _publish_pipeline if issubclass(trainer, AsyncPipelineTrainer) else _publish_stock
            replicas = (
                self.rollout_pool.replicas
                if issubclass(trainer, AsyncPipelineTrainer)
                else self.standalone_server_manager.get_replicas()
            )
            asyncio.run(_run(self, publish, [replica.servers[0] for replica in replicas]))

    return Publishing


async def _run(trainer: Any, publish: Any, servers: Sequence[Any]) -> None:
    rng = random.Random(0)
    # verl's trainer has already published version 0.
    await publish(trainer, FIRST)

    stop = asyncio.Event()
    clients = [
        asyncio.create_task(_send_requests(server, stop))
        for server in servers
        for _ in range(int(os.environ[REQUESTS]))
    ]

    for version in range(FIRST + 1, FIRST + 1 + int(os.environ[VERSIONS])):
        await asyncio.sleep(rng.uniform(*BETWEEN_S))
        started = time.monotonic()
        facts = await publish(trainer, version)
        of_this_job().add(PUBLICATION, started, **facts)

    await asyncio.sleep(BETWEEN_S[1])
    started = time.monotonic()
    of_this_job().add(LIMITS, started, **await asyncio.to_thread(limits))
    stop.set()
    await asyncio.gather(*clients)


async def _send_requests(server: Any, stop: asyncio.Event) -> None:
    while not stop.is_set():
        await server.generate.remote(
            prompt_ids=list(range(3, 3 + PROMPT_TOKENS)),
            sampling_params={"temperature": 1.0, "max_tokens": RESPONSE_TOKENS, "ignore_eos": True},
            request_id=uuid4().hex,
        )


async def _publish_pipeline(trainer: Any, version: int) -> dict[str, float]:
    started = time.monotonic()
    ticket = await trainer.gather(version)
    gathered = time.monotonic()
    publication = await trainer.rollout_pool.publish(ticket)
    return {
        "trainer_stall": gathered - started,
        "bytes": publication.num_bytes,
        "replicas": publication.replicas,
        "gather_s": publication.gather_s,
        "transfer_s": publication.transfer_s,
        "load_s": publication.load_s,
        "tokens_read_again": publication.tokens_read_again,
    }


async def _publish_stock(trainer: Any, version: int) -> dict[str, float]:
    started = time.monotonic()
    await asyncio.to_thread(trainer.standalone_checkpoint_manager.update_weights, global_steps=version)
    return {"trainer_stall": time.monotonic() - started}


class SyncTaskRunner(_StockRunner):  # type: ignore[misc]
    """verl's task runner with a trainer that only updates weights."""

    def run(self, config: Any) -> None:
        """Run verl's task with a trainer that only updates weights."""
        lookup = verl_v1.get_trainer_cls
        verl_v1.get_trainer_cls = lambda mode: publishing(lookup(mode))
        super().run(config)
