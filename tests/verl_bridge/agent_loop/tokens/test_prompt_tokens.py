# SPDX-License-Identifier: Apache-2.0
"""Agent loops get verl's tokens, with one tokenization for all responses to a prompt."""

from __future__ import annotations

import asyncio
import copy
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from recipe.async_pipeline.lab.tasks.tokenizer import make_tokenizer
from recipe.async_pipeline.verl_bridge.agent_loop.tokens import prompt_tokens
from tests.conftest import Load
from tests.fakes.model_families import FAMILIES, tokenizer_of

pytestmark = pytest.mark.real_engine

MESSAGES = [{"role": "user", "content": "12+30="}]


@pytest.fixture
def verl(load: Load) -> ModuleType:
    return load("verl.experimental.agent_loop.agent_loop")


@pytest.fixture
def builder(verl: ModuleType) -> Any:
    """A builder of verl that counts the prompts that it renders."""
    from verl.utils.tokenizer.continuous_token import ContinuousTokenBuilder

    class Builder(ContinuousTokenBuilder):  # type: ignore[misc]
        rendered = 0

        def _render_tokens(self, messages: Any, **kwargs: Any) -> list[int]:
            self.rendered += 1
            return [len(str(messages)), len(str(kwargs["tools"])), 7]

    return Builder(tokenizer=None)


def loop_of(builder: Any, **others: Any) -> Any:
    return SimpleNamespace(
        continuous_token_builder=builder,
        processor=None,
        rollout_config=SimpleNamespace(prompt_length=100),
        _cap_text_prompt_length=lambda tokens: tokens,
        loop=asyncio.get_running_loop(),
        **others,
    )


@pytest.mark.parametrize("content", ["12+30=", "long " * prompt_tokens.SHORT_BYTES])
async def test_equal_messages_are_tokenized_once(verl: ModuleType, builder: Any, content: str) -> None:
    stock = verl.AgentLoopBase.ct_build_initial_tokens
    build = prompt_tokens.tokenized_once(stock)

    messages = [{"role": "user", "content": content}]
    expected = await stock(loop_of(builder), messages)
    builder.rendered = 0
    for _ in range(3):
        found = await build(loop_of(builder), copy.deepcopy(messages), images=None)
        assert found == expected
        found.append(0)  # a loop may append to its tokens
    assert builder.rendered == 1

    messages[0]["content"] += "!"
    assert await build(loop_of(builder), messages) == await stock(loop_of(builder), messages)
    tools = [{"name": "add"}]
    with_tools = await build(loop_of(builder), messages, tools=tools)
    assert with_tools == await stock(loop_of(builder), messages, tools=tools)


async def test_each_response_is_checked_for_its_length(verl: ModuleType, builder: Any) -> None:
    build = prompt_tokens.tokenized_once(verl.AgentLoopBase.ct_build_initial_tokens)

    checked: list[Any] = []

    def cap(tokens: list[int]) -> list[int]:
        checked.append(tokens)
        return tokens[:1]

    for _ in range(2):
        loop = loop_of(builder)
        loop._cap_text_prompt_length = cap
        assert len(await build(loop, MESSAGES)) == 1
    assert len(checked) == 2


async def test_prompts_with_a_processor_or_odd_objects_are_left_to_verl() -> None:
    async def stock(loop: Any, messages: Any, **given: Any) -> Any:
        return messages, given

    build = prompt_tokens.tokenized_once(stock)

    loop = loop_of(None)
    odd = [{"content": lambda: None}]
    assert await build(loop, odd) == (odd, {"tools": None})
    loop.processor = object()
    assert await build(loop, MESSAGES, images=[1]) == (MESSAGES, {"tools": None, "images": [1]})


@pytest.mark.parametrize("log_probs", [None, [-1.0, -2.0]])
async def test_a_turn_is_appended_as_by_verl(verl: ModuleType, builder: Any, log_probs: Any) -> None:
    given = ([1, 2, 3], [4, 5], [0], None if log_probs is None else [0.0])
    stock = await verl.AgentLoopBase.ct_merge_assistant_token(
        loop_of(builder), *copy.deepcopy(given), assistant_logprobs=log_probs
    )
    ours = await prompt_tokens.merge_assistant_token(
        loop_of(builder), *copy.deepcopy(given), assistant_logprobs=log_probs
    )
    assert ours == stock


def test_a_builder_is_created_for_each_set_of_arguments() -> None:
    made: list[Any] = []

    def create(tokenizer: Any, **arguments: Any) -> Any:
        made.append((tokenizer, arguments))
        return object()

    once = prompt_tokens.created_once(create)
    tokenizer, chat = object(), {"enable_thinking": False}
    first = once(tokenizer, chat_template_kwargs={}, processor=None)
    assert once(tokenizer, chat_template_kwargs={}, processor=None) is first
    assert once(tokenizer, chat_template_kwargs=chat) is not first
    assert once(tokenizer, chat_template_kwargs=chat) is once(tokenizer, chat_template_kwargs=chat)
    assert once(object(), chat_template_kwargs={}) is not first
    assert len(made) == 3


TOKENIZER = make_tokenizer()
EOS = int(TOKENIZER.eos_token_id)


def config_of(**model: Any) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.create({"actor_rollout_ref": {"model": model}})


@pytest.mark.parametrize(
    ("ends", "expected"), [(None, {EOS}), (EOS, {EOS}), (11, {EOS, 11}), ([EOS, 7, 9], {EOS, 7, 9})]
)
def test_engines_stop_at_all_ends_of_the_generation_config(
    module: ModuleType, tmp_path: Path, ends: Any, expected: set[int]
) -> None:
    from transformers import GenerationConfig, LlamaConfig

    size = len(TOKENIZER) + 5
    LlamaConfig(vocab_size=size).save_pretrained(tmp_path)
    GenerationConfig(eos_token_id=ends).save_pretrained(tmp_path)
    found = module.tokens_of(config_of(path=str(tmp_path)), TOKENIZER)
    assert found == (size, expected), "the embedding may be larger than the tokenizer"
    assert module.turn_ends(found, {"stop_token_ids": [3]}) == expected | {3}
    assert module.turn_ends(found, {"stop_token_ids": None}) == expected


def test_a_folder_without_a_generation_config(module: ModuleType, tmp_path: Path) -> None:
    from transformers import LlamaConfig

    LlamaConfig(vocab_size=99, eos_token_id=[5, 6]).save_pretrained(tmp_path)
    found = module.tokens_of(config_of(path="other", hf_config_path=str(tmp_path)), TOKENIZER)
    assert found == (99, {EOS, 5, 6})


def test_a_model_that_transformers_does_not_know(module: ModuleType, tmp_path: Path) -> None:
    from transformers import GenerationConfig

    (tmp_path / "config.json").write_text('{"model_type": "of_tomorrow", "vocab_size": 7}')
    GenerationConfig(eos_token_id=[8]).save_pretrained(tmp_path)
    found = module.tokens_of(config_of(path=str(tmp_path)), TOKENIZER)
    assert found == (len(TOKENIZER), {EOS, 8})


def test_without_a_model_the_tokenizer_counts(module: ModuleType) -> None:
    assert module.tokens_of(config_of(), TOKENIZER) == (len(TOKENIZER), {EOS})


def said(module: ModuleType, folder: Path, family: str, model_type: str, agent_loop: str) -> list[str]:
    tokenizer_of(FAMILIES[family]).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}), encoding="utf-8")
    from transformers import AutoTokenizer

    config = {"actor_rollout_ref": {"rollout": {"agent": {"default_agent_loop": agent_loop}}}}
    lines: list[str] = []
    module.warn_of_turns(config, AutoTokenizer.from_pretrained(folder), lines.append)
    return lines


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_that_verl_knows_is_no_finding(module: ModuleType, tmp_path: Path, family: str) -> None:
    assert said(module, tmp_path, family, family, "environment") == []


def test_a_lost_separator_is_named(module: ModuleType, tmp_path: Path) -> None:
    (line,) = said(module, tmp_path, "qwen2", "of_no_family", "tool_agent")
    assert "template writes '<|im_end|>\\n<|im_start|>user\\n3<|im_end|>\\n<|im_start|>assistant\\n'" in line
    assert "ContinuousTokenBuilder for model type of_no_family appends '<|im_end|><|im_start|>user" in line


@pytest.mark.parametrize("agent_loop", ["single_turn_agent", "diffusion"])
def test_single_turns_are_not_compared(module: ModuleType, tmp_path: Path, agent_loop: str) -> None:
    assert said(module, tmp_path, "qwen2", "of_no_family", agent_loop) == []


def test_a_template_that_refuses_is_left_to_the_episodes(
    module: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer: Any = tokenizer_of(FAMILIES["qwen2"])
    tokenizer.chat_template = "{{ raise_exception('no users') }}"
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}', encoding="utf-8")
    tokenizer.name_or_path = str(tmp_path)
    config = {"actor_rollout_ref": {"rollout": {"agent": {"default_agent_loop": "environment"}}}}
    module.warn_of_turns(config, tokenizer, pytest.fail)
    assert "no users" in caplog.text
