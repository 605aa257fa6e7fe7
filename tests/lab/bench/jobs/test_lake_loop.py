# SPDX-License-Identifier: Apache-2.0
"""An episode of a benchmark's lake: the moves are played, each step waits, and any trainer can read it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from recipe.async_pipeline.lab.bench.inputs.waits import LognormalWait
from recipe.async_pipeline.lab.bench.measuring.spans import SPANS_DIR, read_spans
from recipe.async_pipeline.lab.tasks.tokenizer import make_tokenizer
from tests.conftest import Load

pytestmark = pytest.mark.real_engine
WAIT = {"median": 1e-3, "sigma": 0.5, "cap": 2e-3}
EPISODE = {"environment": "frozen_lake", "turns": 3, "tool_s": WAIT}
SEED, PROMPT = 11, 7


@pytest.fixture(scope="module")
def module(load: Load) -> ModuleType:
    pytest.importorskip("gymnasium")
    return load("recipe.async_pipeline.lab.bench.jobs.lake_loop")


class Policy:
    """Bumps into the upper edge; answers report versions as verl's plain client does."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.turns = tokenizer, 0

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: Mapping[str, Any], image_data: None
    ) -> Any:
        self.turns += 1
        tokens = [*self.tokenizer.encode("U", add_special_tokens=False), self.tokenizer.eos_token_id]
        extra = {"global_steps": self.turns}
        return SimpleNamespace(token_ids=tokens, log_probs=[-1.0, -2.0], extra_fields=extra, num_preempted=0)


def play(module: ModuleType, **row: Any) -> Any:
    tokenizer, wrap = make_tokenizer(), SimpleNamespace
    rollout = {"prompt_length": 64, "response_length": 64}

    async def episode() -> Any:
        loop = module.LakeLoop(
            trainer_config=wrap(config=OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}})),
            server_manager=Policy(tokenizer),
            tokenizer=tokenizer,
            processor=None,
            dataset_cls=None,
            data_config=wrap(config=OmegaConf.create({})),
            hf_model_type="qwen2",
            episode=OmegaConf.create(EPISODE),
            seed=SEED,
        )
        given = {"raw_prompt": [{"role": "user", "content": ""}], "extra_info": {"seed": 5}, "index": PROMPT}
        return await loop.run({"temperature": 1.0}, **{**given, **row})

    return asyncio.run(episode())


def test_an_episode(module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SPANS_DIR, str(tmp_path))
    module.of_this_job.cache_clear()
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(module.asyncio, "sleep", sleep)
    output = play(module, session_id=2)
    assert output.response_mask == [1, 1, *[0] * 6, 1, 1, *[0] * 6, 1, 1]
    assert (output.num_turns, output.reward_score) == (6, 0.0)
    draws = [LognormalWait(**WAIT).draw(SEED, "tool", PROMPT, 2, turn) for turn in (1, 2, 3)]
    assert waited == draws, "the same in every arm"
    fields = output.extra_fields
    assert (fields["min_global_steps"], fields["max_global_steps"]) == (1, 3)
    json.dumps(fields)
    assert not {module.END, module.WHY} & set(fields)

    spans = read_spans(tmp_path)
    assert [sum(span.name == name for span in spans) for name in ("generate", "tool", "episode")] == [3, 3, 1]
    assert next(span.facts for span in spans if span.name == "episode") == {"prompt": PROMPT}
    module.of_this_job.cache_clear()
