# SPDX-License-Identifier: Apache-2.0
"""What is particular to SGLang; `weight_sync/engine/test_versioned_engine.py` has the contract of engines."""

from __future__ import annotations

import asyncio

import pytest

from recipe.async_pipeline.verl_bridge.rollout.sglang.engine import _asked
from recipe.async_pipeline.weight_sync.engine.versioned_engine import AttemptOptions, recorded_spans
from tests.fakes.timed_engine import Answer
from tests.fakes.tokenizer_manager import Request, TokenizerManager


@pytest.mark.slow
async def test_the_token_after_an_abort_is_written_again() -> None:
    """SGLang does not check whether it was the last one: here it was, and nothing would be left."""
    manager = TokenizerManager()

    versioned = manager.serve_versions()
    await versioned.load(0, manager.loading(0, 0.0), "abort")
    clock = asyncio.create_task(manager.run())

    async def ask() -> Answer:
        with recorded_spans():
            return await manager.ask("r", 3)

    asked = asyncio.create_task(ask())
    await asyncio.sleep(2.5)
    await versioned.load(1, manager.loading(1, 0.0), "abort")
    said = await asked
    clock.cancel()
    assert said.token_ids == [0, 0, 1]
    assert [sent.max_tokens for sent in manager.sent] == [3, 1]


@pytest.mark.virtual_time
async def test_a_request_that_is_given_up_is_aborted() -> None:
    manager = TokenizerManager()

    versioned = manager.serve_versions()
    await versioned.load(0, manager.loading(0, 0.0), "keep")
    clock = asyncio.create_task(manager.run())
    asked = asyncio.create_task(manager.ask("r", 50))
    await asyncio.sleep(2.5)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    await asyncio.sleep(1.0)
    clock.cancel()
    assert len(manager.live) == 0


@pytest.mark.parametrize(("own", "used"), [({}, True), ({"ignore_eos": False}, False)])
def test_a_request_has_the_defaults_that_it_does_not_set(own: dict[str, bool], used: bool) -> None:
    """verl passes `rollout.ignore_eos` to vLLM only."""
    request = Request("r", [1, 2], {"max_new_tokens": 4, **own})
    asked = _asked(request, AttemptOptions(), {"ignore_eos": True})
    assert asked.sampling_params == {"max_new_tokens": 4, "ignore_eos": used}
    assert request.sampling_params == {"max_new_tokens": 4, **own}
