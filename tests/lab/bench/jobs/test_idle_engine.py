# SPDX-License-Identifier: Apache-2.0
"""The server whose engine costs nothing, in virtual time."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest

from recipe.async_pipeline.core.waits.clock import run_virtual
from recipe.async_pipeline.lab.bench.inputs.waits import LognormalWait
from recipe.async_pipeline.lab.bench.jobs.idle_engine import IdleServer
from recipe.async_pipeline.weight_sync.engine.versioned_engine import LoadMode
from recipe.async_pipeline.weight_sync.memory.manifest import WeightTicket

WAIT = LognormalWait(median=1.0, sigma=0.0, cap=1.0)


def server() -> IdleServer:
    return IdleServer(0, seed=1, answer_s=WAIT)


async def serve(one: IdleServer, version: int) -> None:
    ticket = WeightTicket(version=version, board="", pid=1, num_bytes=0, gather_s=0.0)
    await one.prepare_version(ticket, None, 1.0, "host")
    await one.commit_version(version, 0, 1.0, LoadMode("keep", "host", True))


def ask(one: IdleServer, name: str) -> Any:
    return one.generate(request_id=name, sampling_params={"logprobs": True}, prompt_ids=[1])


def fields_of(output: Any) -> dict[str, Any]:
    """What the receiver gets, without verl."""
    fields: dict[str, Any] = output.__reduce__()[1][0]
    return fields


def test_a_response_names_the_versions_that_wrote_it() -> None:
    async def run() -> tuple[Any, Any]:
        one = server()
        await serve(one, 3)
        plain = await ask(one, "a")
        mixed = asyncio.create_task(ask(one, "b"))
        await asyncio.sleep(0.5)
        await serve(one, 4)
        return plain, await mixed

    plain, mixed = run_virtual(run())
    assert fields_of(plain)["extra_fields"]["version_spans"] == [[3, 0]]
    found = fields_of(mixed)
    assert [version for version, _ in found["extra_fields"]["version_spans"]] == [3, 4]
    assert (found["extra_fields"]["min_global_steps"], found["extra_fields"]["max_global_steps"]) == (3, 4)
    assert len(found["log_probs"]) == len(found["token_ids"]) > 0


@pytest.mark.virtual_time
async def test_a_request_can_be_given_up() -> None:
    one = server()
    await serve(one, 0)
    open_ = [asyncio.create_task(ask(one, name)) for name in "abc"]
    await asyncio.sleep(0.1)
    await one.give_up("b")
    await one.give_up("unknown")
    results = await asyncio.gather(*open_, return_exceptions=True)
    assert [isinstance(result, asyncio.CancelledError) for result in results] == [False, True, False]
    assert await one.most_open_requests() == 3


@pytest.mark.real_engine
def test_the_receiver_gets_verls_output() -> None:
    async def run() -> Any:
        one = server()
        await serve(one, 0)
        return await ask(one, "a")

    from verl.workers.rollout.replica import TokenOutput

    received = pickle.loads(pickle.dumps(run_virtual(run())))
    assert type(received) is TokenOutput
    assert received.stop_reason == "completed"
