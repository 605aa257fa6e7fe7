# SPDX-License-Identifier: Apache-2.0
"""What is particular to vLLM; `weight_sync/engine/test_versioned_engine.py` has the contract of engines."""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType
from typing import Any, get_args

import pytest

from recipe.async_pipeline.config.knobs.weight_sync import InFlightPolicy
from recipe.async_pipeline.core.waits.clock import run_virtual
from recipe.async_pipeline.verl_bridge.rollout.vllm.engine import rejections
from recipe.async_pipeline.weight_sync.engine.versioned_engine import recorded_spans
from tests.fakes.async_llm import AsyncLLM, Params, Retryable
from tests.fakes.timed_engine import LOG_PROB, PROMPT


def outputs_of(engine: AsyncLLM, in_flight: str, asked: Params, load_at: float) -> list[Any]:
    """All outputs of one request that meets a load."""

    async def main() -> list[Any]:
        versioned = engine.serve_versions()
        await versioned.load(0, engine.loading(0, 0.0), in_flight)
        clock = asyncio.create_task(engine.run())

        async def ask() -> list[Any]:
            prompt = {"prompt_token_ids": PROMPT}
            with recorded_spans():
                return [o async for o in engine.generate(prompt, asked, request_id="r")]

        asking = asyncio.create_task(ask())
        await asyncio.sleep(load_at)
        await versioned.load(1, engine.loading(1, 0.0), in_flight)
        outputs = await asking
        clock.cancel()
        return outputs

    return run_virtual(main())


@pytest.mark.parametrize("in_flight", get_args(InFlightPolicy))
@pytest.mark.parametrize("stop", [[], ["\n"]])
def test_no_output_is_made_without_a_reader(in_flight: str, stop: list[str]) -> None:
    engine, asked = AsyncLLM(), Params(3, stop=stop)
    outputs = outputs_of(engine, in_flight, asked, load_at=10.0)
    assert len(outputs) == (3 if in_flight == "abort" else 1)
    assert engine.params[0].detokenize == bool(stop), "stop strings are looked for in the text"
    assert asked == Params(3, stop=stop), "the caller's are left alone"


def test_a_response_of_two_attempts_has_the_fields_of_one() -> None:
    last = outputs_of(AsyncLLM(), "abort", Params(6), load_at=2.5)[-1]
    part = last.outputs[0]
    assert part.token_ids == [0, 0, 1, 1, 1, 1]
    assert [next(iter(entry)) for entry in part.logprobs] == part.token_ids
    assert part.cumulative_logprob == pytest.approx(LOG_PROB * 6)
    assert part.text == "x" * 6
    assert last.prompt_token_ids == PROMPT


def test_rejections_are_found_by_their_name(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("vllm.exceptions")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert rejections() == ()
    module.RetryableRequestError = Retryable  # type: ignore[attr-defined]
    assert rejections() == (Retryable,)
