# SPDX-License-Identifier: Apache-2.0
"""The policy of a session: verl's builders and parsers, and what is refused instead of raised."""

from __future__ import annotations

import asyncio
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from PIL import Image
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.utils.dataset.rl_dataset import RLHFDataset

from recipe.async_pipeline.agents.environment import png
from recipe.async_pipeline.errors import RequestRefused
from recipe.async_pipeline.gateway.conversation import SentPicture
from recipe.async_pipeline.gateway.turns import CannotAppend, Form
from recipe.async_pipeline.lab.tasks.look_task.look_model import (
    IMAGE,
    VISION_END,
    VISION_START,
    make_processor,
)
from recipe.async_pipeline.lab.tasks.tokenizer import make_tokenizer
from tests.fakes.model_families import FAMILIES, tokenizer_of

pytestmark = pytest.mark.real_engine
TOKENIZER, PROCESSOR = make_tokenizer(), make_processor()
EOS = int(TOKENIZER.eos_token_id)
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "", "parameters": {"type": "object", "properties": {}}},
}


class Client:
    """Notes the request, and answers."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.asked: dict[str, Any] = {}

    async def generate(self, **asked: Any) -> Any:
        self.asked = asked
        return SimpleNamespace(
            token_ids=self.tokens, log_probs=None, extra_fields={"version_spans": [[3, 0]]}
        )


def policy_of(
    module: ModuleType,
    tokens: list[int] | None = None,
    builder: Any = None,
    path: str = "",
    tokenizer: Any = TOKENIZER,
    parser: str = "hermes",
    client: Client | None = None,
    sees: bool = False,
    **params: Any,
) -> Any:
    from omegaconf import OmegaConf
    from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

    rollout = OmegaConf.create({"prompt_length": 64, "response_length": 64, "limit_images": 2})
    config = OmegaConf.create({"actor_rollout_ref": {"model": {"path": path or None}, "rollout": rollout}})
    loop: Any = SimpleNamespace(
        config=config,
        rollout_config=rollout,
        continuous_token_builder=builder or create_continuous_token_builder(tokenizer, hf_model_type="qwen2"),
        tokenizer=tokenizer,
        processor=None,
        server_manager=client or Client(tokens or []),
    )
    if sees:
        loop = SingleTurnAgentLoop(
            trainer_config=SimpleNamespace(config=config),
            server_manager=loop.server_manager,
            tokenizer=PROCESSOR.tokenizer,
            processor=PROCESSOR,
            dataset_cls=RLHFDataset,
            data_config=SimpleNamespace(config=OmegaConf.create({})),
            hf_model_type="qwen2_5_vl",
        )
    return module.SessionPolicy(loop, params, parser)


def encoded(text: str) -> list[int]:
    found: list[int] = TOKENIZER.encode(text, add_special_tokens=False)
    return found


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize("size", [1, 10_000])
def test_tokens_of_messages(module: ModuleType, size: int) -> None:
    """Long ones are tokenized in a thread."""
    policy, text = policy_of(module), "q" * size
    tokens = asyncio.run(policy.begin([user(text)], []))
    assert tokens == encoded(text)
    written = [*tokens, *encoded("a"), EOS]
    history = [user(text), {"role": "assistant", "content": "a"}]
    more, kept = asyncio.run(policy.append(history, [user(text)], written, []))
    assert kept == len(written) and more == [*written, *encoded(f"\n{text}")]


class Broken:
    """A template that accepts nothing."""

    def build_initial_tokens(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("roles must alternate")

    merge_context_tokens = build_initial_tokens


def test_a_template_that_refuses_is_the_agents_business(module: ModuleType) -> None:
    policy = policy_of(module, builder=Broken())
    with pytest.raises(RequestRefused, match="refuses these messages: roles must alternate"):
        asyncio.run(policy.begin([user("q")], []))
    with pytest.raises(CannotAppend, match="roles must alternate"):
        asyncio.run(policy.append([], [user("q")], [EOS], []))


@pytest.mark.parametrize("shown", ["call.arguments | tojson", "'' + call.arguments"])
def test_templates_get_arguments_as_they_expect_them(module: ModuleType, shown: str) -> None:
    """Most write a mapping as JSON, but DeepSeek's concatenate a text."""
    from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{%- for message in messages -%}{%- if message.tool_calls -%}"
        f"{{%- set call = message.tool_calls[0].function -%}}{{{{- {shown} -}}}}"
        "{%- else -%}{{- message.content -}}{%- endif -%}{%- endfor -%}"
    )
    builder = create_continuous_token_builder(tokenizer, hf_model_type="qwen2")
    policy = policy_of(module, builder=builder, tokenizer=tokenizer)
    called = {"type": "function", "function": {"name": "add", "arguments": {"x": 4}}}
    said = {"role": "assistant", "content": "", "tool_calls": [called]}
    tokens = asyncio.run(policy.begin([user("q"), said, user("r")], []))
    assert tokenizer.decode(tokens) == 'q{"x": 4}r'


def test_an_answer_is_whole_with_its_end_token(module: ModuleType) -> None:
    for tokens, whole in (([1, EOS], True), ([1, 7], True), ([1, 2], False), ([], False)):
        client = Client(tokens)
        policy = policy_of(module, client=client, stop_token_ids=[7])
        answer = asyncio.run(policy.generate("r", [5], 9, ["STOP"]))
        assert answer == (tokens, None, ((3, 0),), whole)
    assert client.asked == {
        "request_id": "r",
        "prompt_ids": [5],
        "sampling_params": {"stop_token_ids": [7], "max_tokens": 9, "stop": ["STOP"]},
        "image_data": None,
    }


async def test_pictures_have_placeholders_and_reach_the_engine(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    # verl adds it where positions depend on pictures.
    monkeypatch.setattr(PROCESSOR, "get_rope_index", None, raising=False)
    client, red, blue = Client([EOS]), SentPicture(drawn("red")), SentPicture(drawn("blue"))
    policy = policy_of(module, client=client, sees=True)
    shown = {"role": "user", "content": [{"type": "text", "text": "q"}, {"type": "image", "image": red}]}
    first = await policy.begin([shown], [])
    said = [*first, *encoded("a"), EOS]
    new = {"role": "user", "content": [{"type": "image", "image": blue}, {"type": "text", "text": "r"}]}
    more, kept = await policy.append([shown, {"role": "assistant", "content": "a"}], [new], said, [])
    await policy.generate("r", more, 9, [], None, [red, blue])

    picture = PROCESSOR.tokenizer.encode(VISION_START + 4 * IMAGE + VISION_END, add_special_tokens=False)
    assert first == [*encoded("q"), *picture]
    assert more == [*said, *encoded("\n"), *picture, *encoded("r")] and kept == len(said)
    assert [one.getpixel((0, 0)) for one in client.asked["image_data"]] == [(255, 0, 0), (0, 0, 255)]
    with pytest.raises(RequestRefused, match="has 3 pictures, and rollout.limit_images is 2") as refused:
        await policy.generate("r", more, 9, [], None, [red, blue, red])
    assert refused.value.end == "tokens"
    why = "the text of the conversation has 2 places for images, of which there are 1"
    with pytest.raises(RequestRefused, match=why):
        await policy.generate("r", more, 9, [], None, [red])


@pytest.mark.parametrize(
    ("sees", "file", "why"),
    [
        (True, b"none", "the picture cannot be shown to the policy: UnidentifiedImageError"),
        (False, b"", "content must be text: an episode shows pictures, but .* reads text only"),
    ],
)
async def test_a_picture_that_cannot_be_shown_is_refused(
    module: ModuleType, sees: bool, file: bytes, why: str
) -> None:
    shown = {"role": "user", "content": [{"type": "image", "image": SentPicture(file)}]}
    with pytest.raises(RequestRefused, match=why):
        await policy_of(module, sees=sees).begin([shown], [])


def drawn(colour: str) -> bytes:
    return png(Image.new("RGB", (56, 56), colour))


def test_an_answer_is_whole_at_any_token_at_which_the_engine_stops(
    module: ModuleType, tmp_path: Path
) -> None:
    from transformers import GenerationConfig, LlamaConfig

    LlamaConfig(vocab_size=300).save_pretrained(tmp_path)
    GenerationConfig(eos_token_id=[EOS, 7]).save_pretrained(tmp_path)
    policy = policy_of(module, [1, 7], path=str(tmp_path))
    assert policy.vocabulary == 300 and asyncio.run(policy.generate("r", [5], 9, [])).whole


def read(module: ModuleType, text: str, tools: list[Any], stop: tuple[str, ...] = ()) -> Any:
    return asyncio.run(policy_of(module).read([*encoded(text), EOS], tools, stop))


def test_a_form_reaches_the_engine(module: ModuleType) -> None:
    client = Client([EOS])
    policy = policy_of(module, client=client, temperature=0.5)
    asyncio.run(policy.generate("r", [1], 8, (), Form(schema={"type": "object"})))
    expected = {"temperature": 0.5, "max_tokens": 8, "structured_outputs": {"json": '{"type": "object"}'}}
    assert client.asked["sampling_params"] == expected
    asyncio.run(policy.generate("r", [1], 8, (), Form(call="add", tools=[TOOL])))
    assert "structural_tag" in client.asked["sampling_params"]["structured_outputs"]
    with pytest.raises(RequestRefused, match=r"tool_choice.*format=hermes or .* only, got gpt-oss"):
        other = policy_of(module, parser="gpt-oss")
        asyncio.run(other.generate("r", [1], 8, (), Form(call="add", tools=[TOOL])))


def test_text_and_calls_are_parsed_as_verl_parses_them(module: ModuleType) -> None:
    written = 'adding <tool_call>{"name": "add", "arguments": {"x": 4}}</tool_call>'
    said = read(module, written, [TOOL])
    assert said.text == "adding" and [call[1:] for call in said.calls] == [("add", '{"x": 4}')]
    assert read(module, written, []).text == written, "without tools it is text"
    assert read(module, "plain", [TOOL]) == ("plain", (), None, "")


def test_a_tool_whose_schema_verl_does_not_know(module: ModuleType) -> None:
    odd = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"anyOf": []}}}}}
    assert read(module, "plain", [odd, TOOL]).text == "plain"


def test_arguments_have_their_types_next_to_an_optional_one(module: ModuleType) -> None:
    """verl's class refuses `anyOf` and a missing description, which every framework writes."""
    properties = {
        "x": {"type": "integer"},
        "y": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
        "name": {"type": "string"},
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}
    policy = policy_of(module, parser="qwen3_coder")
    written = (
        "<tool_call><function=f><parameter=x>4</parameter><parameter=y>5</parameter>"
        "<parameter=name>6</parameter></function></tool_call>"
    )
    said = asyncio.run(policy.read([*encoded(written), EOS], [tool], ()))
    assert [call[1:] for call in said.calls] == [("f", '{"x": 4, "y": 5, "name": "6"}')]


def test_reasoning_is_no_part_of_the_answer(module: ModuleType) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    written = f"<think>shall I <tool_call>?</think>\n\nadding {call}"
    ids = tokenizer.encode(written, add_special_tokens=False)
    said = asyncio.run(policy_of(module, tokenizer=tokenizer).read([*ids, EOS], [TOOL], ()))
    assert (said.reasoning, said.text) == ("shall I <tool_call>?", "adding")
    assert [call.name for call in said.calls] == ["add"]


def test_the_channels_of_gpt_oss(module: ModuleType) -> None:
    """A call that follows the prompt at once, too, where verl's parser expects the beginning of a message."""
    tokenizer = make_tokenizer()
    marks = ["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|constrain|>"]
    tokenizer.add_tokens(marks, special_tokens=True)
    policy = policy_of(module, tokenizer=tokenizer, parser="gpt-oss")
    headers = (
        "<|channel|>commentary to=functions.add <|constrain|>json",
        "<|channel|>commentary to=functions.add<|constrain|>json",
        "<|channel|>commentary to=functions.add json",
        " to=functions.add<|channel|>commentary",
    )
    thought = "<|channel|>analysis<|message|>add 40 and 2<|end|><|start|>assistant"
    for header, (before, reasoning) in product(headers, (("", ""), (thought, "add 40 and 2"))):
        written = f'{before}{header}<|message|>{{"x": 4}}<|call|>'
        ids = tokenizer.encode(written, add_special_tokens=False)
        said = asyncio.run(policy.read(ids, [TOOL], ()))
        assert (said.reasoning, said.text) == (reasoning, "")
        assert [one[1:] for one in said.calls] == [("add", '{"x": 4}')]


def test_the_first_stop_text_ends_an_answer(module: ModuleType) -> None:
    said = read(module, "one STOP two END", [], ("END", "STOP"))
    assert (said.text, said.stop) == ("one ", "STOP")


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("replies", [["user"] * 3, ["tool", "user", "tool"]])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_no_separator_between_turns_is_lost(
    module: ModuleType, model_type: str, replies: list[str], cut: bool
) -> None:
    """Otherwise the policy reads from its second turn on what its template never writes.

    `cut`: the agent's own limits have ended each answer.
    """
    from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

    family = FAMILIES[model_type]
    tokenizer = tokenizer_of(family)
    builder = create_continuous_token_builder(tokenizer, hf_model_type=model_type)
    policy = policy_of(module, builder=builder, tokenizer=tokenizer)
    messages: list[dict[str, Any]] = [user("begin")]
    tokens = asyncio.run(policy.begin(messages, []))
    for i, role in enumerate(replies):
        answer = tokenizer.encode(f"answer {i}", add_special_tokens=False)
        written = [*tokens, *answer, *([] if cut else [tokenizer.convert_tokens_to_ids(family.end)])]
        history = [*messages, {"role": "assistant", "content": f"answer {i}"}]
        reply = {"role": role, "content": f"reply {i}"}
        tokens, kept = asyncio.run(policy.append(history, [reply], written, []))
        messages = [*history, reply]
        whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(tokens) == whole
        assert tokens == tokenizer.encode(whole, add_special_tokens=False)
        assert tokens[:kept] == written[:kept] and kept >= len(written) - 1
