# SPDX-License-Identifier: Apache-2.0
"""verl's own tool agent plays an episode with the calculator, token for token."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from recipe.async_pipeline.lab.tasks.calculator_task.calculator import CALL, result_of
from recipe.async_pipeline.lab.tasks.calculator_task.calculator_build import TOOLS
from recipe.async_pipeline.lab.tasks.calculator_task.calculator_reward import compute_score
from recipe.async_pipeline.lab.tasks.tokenizer import make_tokenizer
from tests.conftest import Load

pytestmark = pytest.mark.real_engine


@pytest.fixture
def tools(load: Load) -> Iterator[list[Any]]:
    module = load("verl.tools.function_tool")
    load("recipe.async_pipeline.verl_bridge.agent_loop.worker")  # installs the deadlines of tools
    before = dict(module.FUNCTION_TOOL_REGISTRY)
    module.FUNCTION_TOOL_REGISTRY.pop("add", None)
    yield module.load_function_tools_from_path(str(TOOLS))
    module.FUNCTION_TOOL_REGISTRY.clear()
    module.FUNCTION_TOOL_REGISTRY.update(before)
    module._LOADED_FUNCTION_TOOL_PATHS.pop(str(TOOLS), None)


class Policy:
    """Writes these texts, turn by turn."""

    def __init__(self, tokenizer: Any, *texts: str) -> None:
        self.turns = [
            [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id] for text in texts
        ]
        self.prompts: list[list[int]] = []

    async def generate(self, request_id: str, prompt_ids: list[int], **kwargs: Any) -> Any:
        self.prompts.append(list(prompt_ids))
        tokens = self.turns[len(self.prompts) - 1]
        fields = {"min_global_steps": 1, "max_global_steps": 1}
        return SimpleNamespace(
            token_ids=tokens,
            log_probs=[-1.0] * len(tokens),
            num_preempted=0,
            routed_experts=None,
            extra_fields=fields,
        )


def played(module: ModuleType, tools: list[Any], *texts: str) -> tuple[Any, Any]:
    tokenizer = make_tokenizer()
    multi_turn = {
        "max_user_turns": None,
        "max_assistant_turns": 2,
        "max_parallel_calls": 1,
        "max_tool_response_length": 256,
        "tool_response_truncate_side": "middle",
        "format": "brackets",
    }
    rollout = {
        "multi_turn": multi_turn,
        "prompt_length": 12,
        "response_length": 32,
        "full_determinism": False,
    }
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}})

    async def episode() -> Any:
        loop = module.ToolAgentLoop(
            trainer_config=SimpleNamespace(config=config),
            server_manager=Policy(tokenizer, *texts),
            tokenizer=tokenizer,
            processor=None,
            dataset_cls=None,
            data_config=SimpleNamespace(config=OmegaConf.create({})),
            hf_model_type="qwen2",
            tools=SimpleNamespace(tools=tools),
        )
        return await loop.run({"temperature": 1.0}, raw_prompt=[{"role": "user", "content": "1234+5678="}])

    return asyncio.run(episode()), tokenizer


def module_of(tools: list[Any]) -> Any:
    """Return the module that verl made of the file."""
    return sys.modules[tools[0].fn.__module__]


def test_the_file_agrees_with_the_task(tools: list[Any]) -> None:
    module = module_of(tools)
    assert module.CALL.pattern == CALL.pattern
    assert module.add(12, 34) == result_of(12, 34)
    assert [tool.name for tool in tools] == ["add"]


def test_one_call_in_four_misbehaves_on_request(
    tools: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = module_of(tools)
    control = tmp_path / "mood"
    monkeypatch.setenv(module.MOOD, str(control))
    assert [module.add(1, 1) for _ in range(8)] == ["2>"] * 8
    control.write_text("raise")
    failed = 0
    for _ in range(8):
        try:
            module.add(1, 1)
        except RuntimeError:
            failed += 1
    assert failed == 2


@pytest.mark.parametrize(
    ("texts", "said", "score"),
    [
        (["6912"], "6912", 1.0),
        (["[1234+5678]", "6912"], "[1234+5678]\n6912>6912", 0.8),
        (["[1+1]", "6912"], "[1+1]\n2>6912", 0.8),
        (["[1234+5678"], "[1234+5678", 0.0),
    ],
)
def test_an_episode_is_what_the_warm_up_teaches_and_the_reward_reads(
    load: Load, tools: list[Any], texts: list[str], said: str, score: float
) -> None:
    output, tokenizer = played(load("verl.experimental.agent_loop.tool_agent_loop"), tools, *texts)
    found = tokenizer.decode(output.response_ids, skip_special_tokens=True)
    assert found == said
    assert compute_score("", found, "6912")["score"] == pytest.approx(score)
    told = [one for one, mine in zip(output.response_ids, output.response_mask, strict=True) if not mine]
    assert tokenizer.decode(told) == (said[said.index("\n") : said.index(">") + 1] if "\n" in said else "")
