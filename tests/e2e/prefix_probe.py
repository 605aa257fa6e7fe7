# SPDX-License-Identifier: Apache-2.0
"""Which prefixes a real engine reuses across loads. Run as a script: MODEL_DIR ENGINE; prints one JSON
object: by case, how many tokens of a prompt came from the cache.

The engine answers one request at a time, so that others wait in it during a load.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from recipe.async_pipeline.weight_sync.engine.versioned_engine import Loaded, Reuse, recorded_spans
from recipe.async_pipeline.weight_sync.memory.arena import ArenaWriter
from recipe.async_pipeline.weight_sync.memory.board import await_manifest
from recipe.async_pipeline.weight_sync.memory.manifest import encode
from tests import HANG_S
from tests.e2e.probed_engines import ENGINES, import_once

MAX_LEN = 250
BLOCK = 32
"""Tokens of a block of vLLM's cache; only whole ones are reused."""


class Probe:
    def __init__(self, model_dir: str, engine: str) -> None:
        self.engine = ENGINES[engine](model_dir, MAX_LEN, at_once=1, block=BLOCK)
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        self.weights = model.state_dict()
        self.writer = ArenaWriter(1 << 20, 16, torch.float32)
        self.version = -1
        self.answers = self.engine.versioned._responses

    async def gather(self) -> bytes:
        """Return the manifest of the next version."""
        self.version += 1
        ticket = self.writer.gather(self.version, self.weights.items())
        return encode(await asyncio.to_thread(await_manifest, ticket, HANG_S))

    async def load(self, manifest: bytes, reuse: Reuse) -> None:
        versioned, version = self.engine.versioned, self.version

        async def load() -> Loaded:
            return await self.engine.load(manifest, versioned.salts(version))

        await versioned.load(version, load, "keep", reuse_prefixes=reuse)

    async def publish(self, reuse: Reuse) -> None:
        await self.load(await self.gather(), reuse)

    async def answering(self) -> None:
        """Wait for a token of a response."""
        while not await self.engine.versioned.written(list(self.answers)):  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    async def sent(self, requests: int) -> None:
        """Wait until the engine has got so many requests, none of which ends."""
        while sum(answer.sent_before is not None for answer in self.answers.values()) < requests:  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    async def cached(
        self, prompt: list[int], session: int | None = None, tokens: int = 1, due: int | None = None
    ) -> int:
        """Return how many tokens of the prompt the engine did not compute, because it had them."""
        with recorded_spans(session, due):
            return await self.engine.cached(prompt, tokens)


def prompt_of(number: int, blocks: int = 2) -> list[int]:
    """Return a prompt of so many blocks and a token; another one for each number."""
    return [20 + number, *(10 + (number + i) % 40 for i in range(BLOCK * blocks))]


async def case_of(probe: Probe, reuse: Reuse, mine: int) -> dict[str, int]:
    """Play a session, and others with the same prompts, over four versions. `mine`: of its prompts."""
    await probe.publish(reuse)
    other, short, long = prompt_of(mine), prompt_of(mine + 1), prompt_of(mine + 1, blocks=4)
    began = probe.version
    found = {"first": await probe.cached(other), "same version": await probe.cached(other)}
    await probe.cached(short)
    await probe.publish(reuse)
    found["next version"] = await probe.cached(other)
    found["its session, next version"] = await probe.cached(long, began)
    await probe.publish(reuse)
    found["its session, next but one"] = await probe.cached(long, began)

    # A request that waits in the engine during a load is written by the new version.
    await probe.cached(other)
    busy = prompt_of(mine + 2)
    manifest = await probe.gather()
    running = asyncio.create_task(probe.cached(busy, tokens=MAX_LEN - len(busy) - 2))
    await probe.answering()
    waiting = asyncio.create_task(probe.cached(other))
    of_session = asyncio.create_task(probe.cached(long, began))
    await probe.sent(3)
    await probe.load(manifest, reuse)
    found["waited during the load"] = await waiting
    found["its session, waited"] = await of_session
    await running
    return found


async def order_of(probe: Probe, *dues: int) -> list[int]:
    """Return in which order the engine answers requests that wait in it."""
    running = asyncio.create_task(probe.cached(prompt_of(0), tokens=MAX_LEN - len(prompt_of(0)) - 2, due=9))
    await probe.answering()
    answered: list[int] = []
    waiting = []
    for due in dues:
        waiting.append(asyncio.create_task(probe.cached(prompt_of(due), due=due)))
        waiting[-1].add_done_callback(lambda answer: answered.append(dues[waiting.index(answer)]))
        await probe.sent(1 + len(waiting))
    await asyncio.gather(running, *waiting)
    return answered


async def run(model_dir: str, engine: str) -> dict[str, Any]:
    probe = Probe(model_dir, engine)
    modes: tuple[Reuse, ...] = (False, "session", True)
    found: dict[str, Any] = {str(reuse): await case_of(probe, reuse, 3 * i) for i, reuse in enumerate(modes)}
    found["order"] = await order_of(probe, 7, 5, 6)
    probe.writer.close()
    probe.engine.shutdown()
    return found


if __name__ == "__main__":
    import_once(sys.argv[2])
    sys.stdout.write("\nREPORT " + json.dumps(asyncio.run(run(sys.argv[1], sys.argv[2]))) + "\n")
