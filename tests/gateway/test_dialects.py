# SPDX-License-Identifier: Apache-2.0
"""The contract that every dialect keeps, with the real clients, whole and streamed."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable, Iterator
from copy import copy
from pathlib import Path
from typing import Any

import pytest

from recipe.async_pipeline.errors import RequestRefused
from recipe.async_pipeline.gateway.conversation import SentPicture, identities, identity
from recipe.async_pipeline.gateway.dialects import DIALECTS, GROUPS, parameter_table
from recipe.async_pipeline.gateway.dialects.anthropic_messages import AnthropicMessages
from recipe.async_pipeline.gateway.dialects.openai_chat import OpenAIChat
from recipe.async_pipeline.gateway.dialects.openai_responses import OpenAIResponses
from recipe.async_pipeline.gateway.sessions import Session
from recipe.async_pipeline.gateway.turns import ANY_TOOL, Ask, Form
from tests import HANG_S
from tests.fakes.agent_policy import END, LIMITS, FakePolicy
from tests.refusals import Refused, cases_of

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")
from tests.fakes.agent_clients import CLIENTS, STATUS_ERRORS  # noqa: E402

Serve = Callable[..., Any]
each = pytest.mark.parametrize(
    ("api", "stream"), [(api, stream) for api in CLIENTS for stream in (False, True)]
)


async def until(holds: Callable[[], bool]) -> None:
    """Wait for a condition of the server, which has no event for it."""
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def white_box(policy: FakePolicy, observations: list[str]) -> Session:
    """Play a conversation without HTTP."""
    session = Session(policy, LIMITS)
    messages = [{"role": "system", "content": "be brief"}]
    for observation in observations:
        messages.append({"role": "user", "content": observation})
        reply = await session.turn(Ask(list(messages), []))
        messages.append(reply.said.as_message())
    return session


@each
async def test_the_same_tokens_log_probs_and_versions_as_without_http(
    serve: Serve, api: str, stream: bool
) -> None:
    """Answers are bytes that follow from the prompt, and mostly no text: encoding them again would show."""
    observations = ["first", "second", "third"]

    expected = (await white_box(FakePolicy(), observations)).rows()
    async with serve() as at:
        client = CLIENTS[api](at.url, at.session.keys.model, stream=stream)
        entries: list[tuple[Any, ...]] = [("system", "be brief")]
        for observation in observations:
            entries.append(("user", observation))
            turn = await client.say(entries)
            assert turn.finish == "stop"
            assert (turn.prompt_tokens, turn.tokens) == (len(at.policy.prompts[-1]), 7)
            entries.append(turn.entry())
        await client.close()
        assert at.session.rows() == expected
        assert len(expected) == 1 and expected[0].answers == 3


FILE = b"a picture"
URL = "data:image/png;base64," + base64.b64encode(FILE).decode()
SOURCE = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(FILE).decode()}
WITH_PICTURES: list[tuple[Any, str, list[Any]]] = [
    (OpenAIChat(), "messages", [{"type": "image_url", "image_url": {"url": URL, "detail": "low"}}]),
    (OpenAIResponses(), "input", [{"type": "input_image", "image_url": URL}]),
    (AnthropicMessages(), "messages", [{"type": "image", "source": SOURCE}]),
]


@pytest.mark.parametrize(("dialect", "name", "picture"), WITH_PICTURES, ids=["chat", "responses", "messages"])
def test_pictures_are_parts_of_messages(dialect: Any, name: str, picture: list[Any]) -> None:
    text = {"type": "input_text" if name == "input" else "text"}
    content = [text | {"text": "a "}, text | {"text": "b"}, *picture, text | {"text": "?"}]
    body = {name: [{"role": "user", "content": content}], "model": "any", "max_tokens": 9}
    (message,) = dialect.read(json.dumps(body).encode()).ask.messages
    assert message["content"] == [
        {"type": "text", "text": "a b"},
        {"type": "image", "image": SentPicture(FILE)},
        {"type": "text", "text": "?"},
    ]
    assert identity(message) != identity({**message, "content": message["content"][:2]})


@each
async def test_tools(serve: Serve, api: str, stream: bool) -> None:
    policy = FakePolicy('adding[add {"x": 4}][add {"x": 5}]', '[add {"x": 6}]', "done")
    async with serve(policy) as at:
        client = CLIENTS[api](at.url, at.session.keys.model, stream=stream)
        entries: list[tuple[Any, ...]] = [("user", "go")]
        first = await client.say(entries, tools=True)
        assert first.text == "adding" and first.finish == "calls"
        assert [call[1:] for call in first.calls] == [("add", {"x": 4}), ("add", {"x": 5})]
        assert len({call[0] for call in first.calls}) == 2
        entries += [first.entry(), *(("tool", call[0], str(call[2]["x"])) for call in first.calls)]
        second = await client.say(entries, tools=True)
        assert (second.text, second.calls[0][1:]) == ("", ("add", {"x": 6}))
        entries += [second.entry(), ("tool", second.calls[0][0], "6")]
        third = await client.say(entries, tools=True)
        assert (third.text, third.calls, third.finish) == ("done", [], "stop")
        await client.close()
        (row,) = at.session.rows()
        assert row.answers == 3
        assert b"<tool>4<tool>5" in bytes(token for token in row.response_ids if token < 256)
        (tools,) = at.policy.tools
        assert tools[0]["function"]["name"] == "add"
        assert tools[0]["function"]["parameters"]["properties"]["x"]["type"] == "integer"


async def call_over_chat(client: Any, results: list[str]) -> list[str]:
    """Answer each call with a result, over OpenAI's chat completions. Returns the arguments of the calls."""
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    messages: list[Any] = [{"role": "user", "content": "go"}]
    written = []
    for result in results:
        answer = await client.chat.completions.create(model="any", messages=messages, tools=[tool])
        (call,) = answer.choices[0].message.tool_calls
        written.append(call.function.arguments)
        said = answer.choices[0].message.model_dump(exclude_none=True)
        messages += [said, {"role": "tool", "tool_call_id": call.id, "content": result}]
    await client.chat.completions.create(model="any", messages=messages, tools=[tool])
    return written


async def call_over_responses(client: Any, results: list[str]) -> list[str]:
    """The same over OpenAI's responses."""
    tool = {"type": "function", "name": "add", "parameters": {"type": "object"}}
    items: list[Any] = [{"role": "user", "content": "go"}]
    written = []
    for result in results:
        answer = await client.responses.create(model="any", input=items, tools=[tool])
        (call,) = (one for one in answer.output if one.type == "function_call")
        written.append(call.arguments)
        items += [one.model_dump(exclude_none=True) for one in answer.output]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
    await client.responses.create(model="any", input=items, tools=[tool])
    return written


@each
async def test_half_a_character_in_the_arguments_of_a_call_reaches_the_agent_as_its_replacement(
    serve: Serve, api: str, stream: bool
) -> None:
    """JSON can name it, but no wire can hold it."""

    policy = FakePolicy('[add {"x": "\\ud83d."}]', "done")
    async with serve(policy) as at:
        client = CLIENTS[api](at.url, at.session.keys.model, stream=stream)
        first = await client.say([("user", "go")], tools=True)
        call, name, arguments = first.calls[0]
        assert (name, arguments) == ("add", {"x": "\ufffd."})
        await client.say([("user", "go"), first.entry(), ("tool", call, "?")], tools=True)
        await client.close()
        assert [row.answers for row in at.session.rows()] == [2]


@pytest.mark.parametrize("calling", [call_over_chat, call_over_responses])
@pytest.mark.parametrize("arguments", ['{"x": 4', "x=4", '{"x": nan}', "4", '"x"', ""])
async def test_malformed_arguments_of_a_call_reach_the_agent_and_do_not_end_its_session(
    serve: Serve, calling: Any, arguments: str
) -> None:
    """The policy has to learn from them, and the history is what it wrote."""

    policy = FakePolicy(f"adding[add {arguments}]", '[add {"x": 5}]', "done")
    async with serve(policy) as at:
        url, key = f"{at.url}/v1", at.session.keys.model
        async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
            assert await calling(client, ["invalid JSON", "5"]) == [arguments, '{"x": 5}']
        (row,) = at.session.rows()
        assert row.answers == 3 and at.session.counts.tokenized_again == 0
        first = [*f"adding[add {arguments}]".encode(), END]
        assert row.response_ids[: len(first)] == first
        assert b"<tool>invalid JSON" in bytes(token for token in row.response_ids if token < 256)


@each
async def test_an_answer_that_is_cut_off(serve: Serve, api: str, stream: bool) -> None:
    async with serve(FakePolicy("abcdef")) as at:
        client = CLIENTS[api](at.url, at.session.keys.model, stream=stream)
        turn = await client.say([("user", "go")], max_tokens=3)
        await client.close()
        assert (turn.text, turn.finish, turn.tokens) == ("abc", "length", 3)


@pytest.mark.slow
@each
async def test_a_client_that_gives_up_waiting_costs_no_second_generation(
    serve: Serve, api: str, stream: bool
) -> None:
    async with serve(FakePolicy("late"), keep_alive_s=60.0) as at:
        at.policy.gate.clear()
        client = CLIENTS[api](at.url, at.session.keys.model, stream=stream, timeout=0.2, max_retries=20)
        asking = asyncio.create_task(client.say([("user", "go")]))
        await until(lambda: at.session.counts.coalesced > 0)
        at.policy.gate.set()
        turn = await asking
        await client.close()
        assert turn.text == "late"
        assert len(at.policy.prompts) == 1 and len(at.session.rows()) == 1


@pytest.mark.slow
@each
async def test_an_answer_that_no_client_has_received_is_neither_trained_nor_scored(
    serve: Serve, api: str, stream: bool
) -> None:
    async with serve(FakePolicy("one", "late", "two"), keep_alive_s=60.0) as at:
        options: dict[str, Any] = {"stream": stream, "max_retries": 0}
        client = CLIENTS[api](at.url, at.session.keys.model, timeout=HANG_S, **options)
        await client.say([("user", "go")])
        at.policy.gate.clear()
        hasty = CLIENTS[api](at.url, at.session.keys.model, timeout=HANG_S, **options)
        entries: list[Any] = [("user", "go"), ("assistant", "one", []), ("user", "slow")]
        asking = asyncio.create_task(hasty.say(entries))
        await until(lambda: len(at.policy.prompts) == 2)
        asking.cancel()
        await asyncio.wait([asking])
        await hasty.close()
        at.policy.gate.set()
        await until(lambda: len(at.session.deliveries.lost()) == 1)
        assert [row.answers for row in at.session.rows()] == [1] and at.session.counts.turns == 2
        turn = await client.say([("user", "go"), ("assistant", "one", []), ("user", "next")])
        await client.close()
        assert turn.text == "two"
        rows = at.session.rows()
        assert [row.answers for row in rows] == [1, 1] and len(at.session.deliveries.lost()) == 1
        assert b"late" not in bytes(token for row in rows for token in row.response_ids if token < 256)


@pytest.mark.slow
@pytest.mark.parametrize("api", CLIENTS)
async def test_a_stream_is_kept_open_while_the_answer_is_written(serve: Serve, api: str) -> None:
    async with serve(FakePolicy("slow"), keep_alive_s=0.02) as at:
        at.policy.gate.clear()
        client = CLIENTS[api](at.url, at.session.keys.model, stream=True, timeout=HANG_S, max_retries=0)
        asking = asyncio.create_task(client.say([("user", "go")]))
        await asyncio.sleep(0.3)
        at.policy.gate.set()
        assert (await asking).text == "slow"
        await client.close()


@each
async def test_errors_are_not_repeated(serve: Serve, api: str, stream: bool) -> None:
    async with serve() as at:
        seen = []
        for key, entries, status in (
            ("sk-unknown", [("user", "go")], 401),
            (at.session.keys.control, [("user", "go")], 403),
            (at.session.keys.model, [("assistant", "nothing precedes it", [])], 400),
            (at.session.keys.model, [("user", "refuse")], 400),
        ):
            client = CLIENTS[api](at.url, key, stream=stream, max_retries=5)
            with pytest.raises(STATUS_ERRORS) as error:
                await client.say(entries)
            await client.close()
            seen.append(error.value.status_code)
            assert error.value.status_code == status
            assert error.value.response.headers["x-should-retry"] == "false"
        at.session.end("recalled")
        client = CLIENTS[api](at.url, at.session.keys.model, stream=stream, max_retries=5)
        with pytest.raises(STATUS_ERRORS, match="the session has ended: recalled") as error:
            await client.say([("user", "go")])
        await client.close()
        assert error.value.status_code == 410
        assert at.policy.prompts == []


@pytest.mark.parametrize("api", CLIENTS)
async def test_an_error_inside_a_stream(serve: Serve, api: str) -> None:
    async with serve(keep_alive_s=0.01) as at:
        at.policy.gate.clear()
        client = CLIENTS[api](at.url, at.session.keys.model, stream=True, max_retries=0)
        asking = asyncio.create_task(client.say([("user", "go")]))
        await until(lambda: bool(at.policy.prompts))
        await asyncio.sleep(0.05)
        at.session.end("recalled")
        with pytest.raises(Exception, match="the session has ended: recalled"):
            await asking
        await client.close()


MESSAGES = [{"role": "user", "content": "go"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 9},
    "/v1/responses": {"input": "go"},
    "/v1/completions": {"prompt": "go"},
}
OF_PATH = {one.path: one for one in DIALECTS}
CALLS = {"type": "tool_use", "id": "c", "name": "f", "input": "{}"}
DEEP: dict[str, Any] = {}
for _ in range(900):
    DEEP = {"x": DEEP}
DEEP_CALL = {"type": "tool_use", "id": "c", "name": "f", "input": DEEP}
DEEPLY: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"tools": [{"function": {"name": "f", "parameters": DEEP}}]}, "the tool 'f'"),
    ("/v1/messages", {"tools": [{"name": "f", "input_schema": DEEP}]}, "the parameters of the tool 'f'"),
    ("/v1/messages", {"messages": [{"role": "assistant", "content": [DEEP_CALL]}]}, "arguments of a call"),
    (
        "/v1/chat/completions",
        {"response_format": {"type": "json_schema", "json_schema": {"schema": DEEP}}},
        "response_format",
    ),
]


@cases_of("all", "gateway")
def test_what_cannot_be_honoured_is_refused_with_its_name(case: Refused) -> None:
    path = OF_PATH[case.section]
    case.replay(lambda changes: path.read(json.dumps(BODIES[path.path] | changes).encode()), RequestRefused)
    assert json.loads(path.error(400, case.message))["error"]["message"] == case.message


@pytest.mark.parametrize(("path", "changes", "part"), DEEPLY)
def test_what_is_deeply_nested_is_refused(path: str, changes: dict[str, Any], part: str) -> None:
    with pytest.raises(RequestRefused, match=f"{part}.* must be nested at most 100 deep") as error:
        OF_PATH[path].read(json.dumps(BODIES[path] | changes).encode())
    assert error.value.status == 400


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'"x"', b"\xff", b'{"messages": 3, "input": 3}', b'{"x": ' + b"[" * 10_000]
)
def test_a_body_of_another_form_is_refused(path: str, body: bytes) -> None:
    with pytest.raises(RequestRefused, match="invalid request|not valid JSON"):
        OF_PATH[path].read(body)


CALL = {"name": "f", "arguments": "{}"}
TOOL = {"name": "f", "description": "d", "parameters": {"type": "object"}}
FULL: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": CALL}]},
            {"role": "tool", "content": "b", "tool_call_id": "c"},
        ],
        "tools": [{"type": "function", "function": TOOL}],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "stream_options": {"include_usage": True},
        "stop": ["s"],
    },
    "/v1/messages": {
        "system": [{"type": "text", "text": "a"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": [{**CALLS, "input": {"x": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "b"}]},
        ],
        "max_tokens": 9,
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto"},
        "stop_sequences": ["s"],
    },
    "/v1/responses": {
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "function_call", "call_id": "c", **CALL},
            {"type": "function_call_output", "call_id": "c", "output": "b"},
            {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "i"},
            {"type": "local_shell_call", "call_id": "c", "action": {"command": ["ls"]}},
        ],
        "tools": [{"type": "function", **TOOL}, {"type": "custom", "name": "f"}, {"type": "local_shell"}],
        "tool_choice": "auto",
        "text": {"format": {"type": "text"}},
    },
    "/v1/completions": {
        "prompt": ["a"],
        "stream_options": {"include_usage": True},
        "stop": ["s"],
        "n": 1,
        "logit_bias": {},
        "temperature": 1.0,
        "seed": 1,
    },
}


def variants(value: Any) -> Iterator[Any]:
    """Yield a value of JSON with each of its parts, once, replaced by each other kind of value."""
    yield from ("x", 3, -0.5, None, True, [], ["x"], [[3]], {}, {"x": []}, {"type": 3}, {"type": {}})
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for at, part in parts:
        for other in variants(part):
            changed = copy(value)
            changed[at] = other
            yield changed


@pytest.mark.parametrize("path", FULL)
def test_any_body_is_read_or_refused(path: str) -> None:
    """Anything else would be an error of the gateway, which clients repeat."""
    count = 0
    for body in variants(FULL[path]):
        try:
            read = OF_PATH[path].read(json.dumps(body).encode())
            identities(read.ask.messages)
            count += 1
        except RequestRefused as error:
            assert "\n" not in str(error)
    assert count > 30, "many are harmless"


def test_calls_of_the_history_have_mappings_as_chat_templates_expect() -> None:
    called = {"name": "f", "arguments": '{"x": [1]}'}
    block = {"type": "tool_use", "id": "c", "name": "f", "input": {"x": [1]}}
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": [{"function": called}]}]}),
        ("/v1/messages", {"messages": [{"role": "assistant", "content": [block]}], "max_tokens": 1}),
        ("/v1/responses", {"input": [{"type": "function_call", "call_id": "c", **called}]}),
    ):
        (message,) = OF_PATH[path].read(json.dumps(body).encode()).ask.messages
        assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": [1]}}


def test_one_call_at_a_time_is_no_rule_of_the_run_and_is_counted() -> None:
    for path, given in (
        ("/v1/chat/completions", {"parallel_tool_calls": False}),
        ("/v1/messages", {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}),
        ("/v1/responses", {"parallel_tool_calls": False}),
    ):
        read = OF_PATH[path].read(json.dumps(BODIES[path] | given).encode())
        assert read.ask.overridden == ("parallel_tool_calls",)


def test_a_limit_of_no_token_is_not_taken_for_none() -> None:
    body = BODIES["/v1/chat/completions"] | {"max_completion_tokens": 0, "max_tokens": 5}
    assert OF_PATH["/v1/chat/completions"].read(json.dumps(body).encode()).ask.max_tokens == 0


def test_the_sampling_parameters_of_the_agent_are_counted() -> None:
    for path, body in BODIES.items():
        assert OF_PATH[path].read(json.dumps(body).encode()).ask.overridden == ()
        read = OF_PATH[path].read(json.dumps(body | {"temperature": 0.0, "top_p": 0.5}).encode())
        assert read.ask.overridden == ("temperature", "top_p")


@pytest.mark.parametrize("path", BODIES)
def test_every_parameter_is_honoured_refused_or_counted(path: str) -> None:
    known = OF_PATH[path].parameters
    groups = [getattr(known, group) for group in GROUPS]
    names = [name for group in groups for name in group]
    assert len(names) == len(set(names)), "a parameter is in one group"
    handled = {*known.honoured, *known.checked, *known.refused, *known.neutral}
    for name in [*names, "a_parameter_of_tomorrow"]:
        if name in BODIES[path] or name in (*known.honoured, *known.checked):
            continue
        body = json.dumps(BODIES[path] | {name: {"x": 1}}).encode()
        if name in known.refused:
            with pytest.raises(RequestRefused, match=f"^{name}: "):
                OF_PATH[path].read(body)
        else:
            counted = OF_PATH[path].read(body).ask.overridden
            assert counted == (() if name in handled else (name,))
        nothing = OF_PATH[path].read(json.dumps(BODIES[path] | {name: None}).encode())
        assert nothing.ask.overridden == ()


def test_names_that_are_counted_are_bounded() -> None:
    many = {f"{i}_{'x' * 100}": 1 for i in range(100)}
    read = OF_PATH["/v1/responses"].read(json.dumps(BODIES["/v1/responses"] | many).encode())
    assert len(read.ask.overridden) == 32 and max(map(len, read.ask.overridden)) == 64


def test_parts_of_parameters_are_counted() -> None:
    body = BODIES["/v1/messages"] | {"output_config": {"effort": "low"}}
    assert OF_PATH["/v1/messages"].read(json.dumps(body).encode()).ask.overridden == ("output_config.effort",)
    body = BODIES["/v1/responses"] | {"text": {"verbosity": "low"}}
    assert OF_PATH["/v1/responses"].read(json.dumps(body).encode()).ask.overridden == ("text.verbosity",)


@pytest.mark.parametrize(
    ("path", "tool", "counted"),
    [
        ("/v1/chat/completions", {"function": {"name": "f", "strict": True}}, ("tools.strict",)),
        ("/v1/chat/completions", {"function": {"name": "f", "strict": False, "x": 1}}, ("tools.x",)),
        ("/v1/responses", {"type": "function", "name": "f", "strict": True}, ("tools.strict",)),
        ("/v1/responses", {"type": "custom", "name": "f", "format": {"type": "grammar"}}, ("tools.format",)),
        ("/v1/responses", {"type": "custom", "name": "f", "format": {"type": "text"}, "strict": None}, ()),
        ("/v1/responses", {"type": "web_search", "filters": {"x": 1}}, ("tools.web_search",)),
        ("/v1/messages", {"name": "f", "strict": True, "cache_control": {"type": "x"}}, ("tools.strict",)),
        (
            "/v1/messages",
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
            ("tools.web_search_20250305",),
        ),
        ("/v1/messages", {"type": "mcp_toolset", "mcp_server_name": "s"}, ("tools.mcp_toolset",)),
    ],
)
def test_parts_of_tools_are_counted(path: str, tool: dict[str, Any], counted: tuple[str, ...]) -> None:
    body = BODIES[path] | {"tools": [tool, tool]}
    assert OF_PATH[path].read(json.dumps(body).encode()).ask.overridden == counted


def test_the_policy_does_not_learn_of_tools_that_the_server_would_run() -> None:
    for path, hosted, own in (
        ("/v1/responses", {"type": "web_search"}, {"type": "function", "name": "f"}),
        ("/v1/messages", {"type": "code_execution_20260521", "name": "c"}, {"name": "f"}),
    ):
        ask = OF_PATH[path].read(json.dumps(BODIES[path] | {"tools": [hosted, own]}).encode()).ask
        assert [one["function"]["name"] for one in ask.tools] == ["f"]


@pytest.mark.parametrize(
    ("path", "part", "counted"),
    [
        ("/v1/chat/completions", {"name": "bob"}, ("messages.name",)),
        (
            "/v1/chat/completions",
            {"reasoning": "hm", "audio": {"id": "a"}},
            ("messages.audio", "messages.reasoning"),
        ),
        ("/v1/chat/completions", {"reasoning_content": "hm", "refusal": None, "annotations": []}, ()),
        ("/v1/messages", {"name": "bob"}, ("messages.name",)),
    ],
)
def test_parts_of_messages_are_counted(path: str, part: dict[str, Any], counted: tuple[str, ...]) -> None:
    said = {"role": "assistant", "content": "a", **part}
    body = BODIES[path] | {"messages": [*MESSAGES, said, *MESSAGES]}
    assert OF_PATH[path].read(json.dumps(body).encode()).ask.overridden == counted


async def test_a_client_of_which_the_server_would_keep_the_conversation_sends_all_of_it(
    serve: Serve,
) -> None:
    """Anthropic's runner of tools sends only results after its first request, unless it is refused."""

    @anthropic.beta_async_tool
    async def add(x: int) -> str:
        """Add.

        Args:
            x: a number
        """
        return str(x + 1)

    async with serve(FakePolicy('[add {"x": 4}]', "5")) as at:
        async with anthropic.AsyncAnthropic(base_url=at.url, api_key=at.session.keys.model) as client:
            asked: Any = [{"role": "user", "content": "go"}]
            runner = client.beta.messages.tool_runner(model="any", max_tokens=99, messages=asked, tools=[add])
            said: Any = await runner.until_done()
        assert said.content[0].text == "5"
        prompt = bytes(token for token in at.policy.prompts[-1] if token < 256)
        assert prompt.endswith(b'<user>go[add {"x": 4}]<tool>5')
        assert [row.answers for row in at.session.rows()] == [2]
        assert at.session.counts.ignored == {}


S = {"type": "object", "properties": {"a": {"type": "integer"}}}
CHAT_TOOLS = {"tools": [{"type": "function", "function": {"name": "f"}}]}
ITEM_TOOLS = {"tools": [{"type": "function", "name": "f", "parameters": {}}]}
BLOCK_TOOLS = {"tools": [{"name": "f", "input_schema": {}}]}


@pytest.mark.parametrize(
    ("path", "changes", "schema", "call"),
    [
        ("/v1/chat/completions", {"response_format": {"type": "text"}}, None, None),
        ("/v1/chat/completions", {"response_format": {"type": "json_object"}}, {"type": "object"}, None),
        (
            "/v1/chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": S}}},
            S,
            None,
        ),
        ("/v1/chat/completions", {**CHAT_TOOLS, "tool_choice": "required"}, None, ANY_TOOL),
        (
            "/v1/chat/completions",
            {**CHAT_TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}},
            None,
            "f",
        ),
        ("/v1/responses", {"text": {"format": {"type": "json_schema", "name": "n", "schema": S}}}, S, None),
        ("/v1/responses", {"text": {"format": {"type": "json_object"}}}, {"type": "object"}, None),
        ("/v1/responses", {**ITEM_TOOLS, "tool_choice": "required"}, None, ANY_TOOL),
        ("/v1/responses", {**ITEM_TOOLS, "tool_choice": {"type": "function", "name": "f"}}, None, "f"),
        ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": S}}}, S, None),
        ("/v1/messages", {"output_format": {"type": "json_schema", "schema": S}}, S, None),
        ("/v1/messages", {**BLOCK_TOOLS, "tool_choice": {"type": "any"}}, None, ANY_TOOL),
        ("/v1/messages", {**BLOCK_TOOLS, "tool_choice": {"type": "tool", "name": "f"}}, None, "f"),
    ],
)
def test_the_form_of_an_answer(
    path: str, changes: dict[str, Any], schema: dict[str, Any] | None, call: str | None
) -> None:
    ask = OF_PATH[path].read(json.dumps(BODIES[path] | changes).encode()).ask
    form = ask.form or Form()
    assert (form.schema, form.call, ask.overridden) == (schema, call, ())
    assert form.tools == (ask.tools if ask.form else ())


def test_the_page_has_the_table_of_parameters() -> None:
    page = Path(__file__).parents[2] / "docs" / "agents.md"
    assert parameter_table() in page.read_text(encoding="utf-8"), "run `bash run_scripts/fix.sh`"


def test_parts_and_roles_that_mean_the_same() -> None:
    chat = OF_PATH["/v1/chat/completions"]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = {"messages": [{"role": "developer", "content": parts}, {"role": "assistant", "content": None}]}
    assert chat.read(json.dumps(body).encode()).ask.messages == [
        {"role": "system", "content": "ab"},
        {"role": "assistant", "content": ""},
    ]


def test_tools_that_the_agent_forbids_are_not_shown() -> None:
    tool = {"name": "f"}
    for path, tools, choice in (
        ("/v1/chat/completions", [{"type": "function", "function": tool}], "none"),
        ("/v1/messages", [tool], {"type": "none"}),
        ("/v1/responses", [{"type": "function", **tool}], "none"),
    ):
        body = BODIES[path] | {"tools": tools}
        assert len(OF_PATH[path].read(json.dumps(body).encode()).ask.tools) == 1
        body["tool_choice"] = choice
        assert OF_PATH[path].read(json.dumps(body).encode()).ask.tools == []


def test_anthropic_keeps_calls_with_invalid_arguments() -> None:
    """The wire has only mappings, and the history must still be the one that the policy wrote."""
    messages = OF_PATH["/v1/messages"]
    block = {"type": "tool_use", "id": "c", "name": "f", "input": {"invalid_json": "{oops"}}
    thinking = {"type": "thinking", "thinking": "hm", "signature": "s"}
    body = {"max_tokens": 1, "messages": [{"role": "assistant", "content": [thinking, block]}]}
    (message,) = messages.read(json.dumps(body).encode()).ask.messages
    assert message["content"] == "" and message["tool_calls"][0]["function"]["arguments"] == "{oops"


async def test_the_policy_continues_the_text_of_a_last_message(serve: Serve) -> None:
    """Anthropic's clients begin an answer so; what they begin is not trained."""

    async with serve(FakePolicy(" yes", "ok")) as at:
        client = CLIENTS["messages"](at.url, at.session.keys.model)
        turn = await client.say([("user", "go"), ("assistant", "I say", [])])
        assert turn.text == " yes"
        await client.say([("user", "go"), ("assistant", "I say yes", []), ("user", "more")])
        await client.close()
        (row,) = at.session.rows()
        assert row.answers == 2
        begun = len(b"I say")
        assert bytes(row.prompt_ids[-begun:]) == b"I say"
        assert row.mask[:5] == [1] * 5


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "assistant", "content": "I"}],
        [{"role": "user", "content": "go"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}],
    ],
)
async def test_a_last_message_that_cannot_be_continued_is_refused(messages: list[dict[str, Any]]) -> None:
    with pytest.raises(RequestRefused, match="must precede|has tool calls"):
        await Session(FakePolicy(), LIMITS).turn(Ask(messages, []))


async def test_the_tokens_of_a_request_are_counted_without_a_turn(serve: Serve) -> None:
    async with serve() as at:
        messages = CLIENTS["messages"](at.url, at.session.keys.model)
        responses = CLIENTS["responses"](at.url, at.session.keys.model)
        asked: Any = [{"role": "user", "content": "go"}]
        counted = await messages.client.messages.count_tokens(model="any", messages=asked)
        assert counted.input_tokens == len(b"<user>go")
        other = await responses.client.responses.input_tokens.count(model="any", input="go")
        assert other.input_tokens == len(b"<user>go")
        await messages.close()
        await responses.close()
        assert at.session.counts.turns == 0 and at.policy.prompts == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_text_is_continued_token_for_token(serve: Serve, stream: bool) -> None:
    """Also if the agent leaves out the stop text with which the policy has ended."""

    async with serve(FakePolicy("one\nObs", "two", "three")) as at:
        client = openai.AsyncOpenAI(base_url=f"{at.url}/v1", api_key=at.session.keys.model)

        async def say(prompt: str, **more: Any) -> str:
            asked: dict[str, Any] = {"model": "any", "prompt": prompt, **more}
            if not stream:
                return str((await client.completions.create(**asked)).choices[0].text)
            chunks = await client.completions.create(stream=True, **asked)
            return "".join([chunk.choices[0].text async for chunk in chunks])

        text = "Q: "
        text += await say(text, stop=["\nObs"])
        assert text == "Q: one"
        text += "\nObs: 4\n"
        text += await say(text)
        text += " more"
        assert await say(text) == "three"
        await client.close()
        (row,) = at.session.rows()
        assert row.answers == 3
        written = bytes(token for token in row.prompt_ids + row.response_ids if token < 256)
        assert written == b"Q: one\nObs: 4\ntwo morethree"


@pytest.mark.parametrize("stream", [False, True])
async def test_tools_of_responses_that_are_no_functions(serve: Serve, stream: bool) -> None:
    """As Codex has them. What OpenAI's servers would run is left out, and counted."""

    policy = FakePolicy('[patch {"input": "*** a"}][local_shell {"command": ["ls", "-l"]}]', "done")
    async with serve(policy) as at:
        client = openai.AsyncOpenAI(base_url=f"{at.url}/v1", api_key=at.session.keys.model)
        tools: Any = [
            {"type": "custom", "name": "patch", "description": "Edits.", "format": {"type": "text"}},
            {"type": "local_shell"},
            {"type": "web_search"},
        ]
        items: list[Any] = [{"role": "user", "content": "go"}]
        asked: dict[str, Any] = {"model": "any", "input": items, "tools": tools}
        if stream:
            async with client.responses.stream(**asked) as events:
                answer: Any = await events.get_final_response()
        else:
            answer = await client.responses.create(**asked)
        patch, shell = answer.output
        assert (patch.type, patch.name, patch.input) == ("custom_tool_call", "patch", "*** a")
        assert (shell.type, shell.action.command) == ("local_shell_call", ["ls", "-l"])
        items += [one.model_dump(exclude_none=True) for one in answer.output]
        items.append({"type": "custom_tool_call_output", "call_id": patch.call_id, "output": "ok"})
        items.append({"type": "local_shell_call_output", "id": shell.call_id, "output": "a b"})
        assert (await client.responses.create(**asked)).output_text == "done"
        await client.close()
        assert [row.answers for row in at.session.rows()] == [2]
        assert [one["function"]["name"] for one in at.policy.tools[0]] == ["patch", "local_shell"]
        assert at.session.counts.overridden == 2


class Thinking(FakePolicy):
    """Reasons before its answer."""

    async def read(self, *args: Any) -> Any:
        return (await super().read(*args))._replace(reasoning="hm")


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_apart_as_each_api_has_it(serve: Serve, stream: bool) -> None:
    async with serve(Thinking("a", "b", "c")) as at:
        url, key = at.url, at.session.keys.model
        chat, messages, responses = (CLIENTS[api](url, key) for api in ("chat", "messages", "responses"))
        user: Any = [{"role": "user", "content": "go"}]
        asked = {"model": "any", "messages": user}
        if stream:
            async with chat.client.chat.completions.stream(**asked) as events:
                said: Any = (await events.get_final_completion()).choices[0].message
            async with messages.client.messages.stream(max_tokens=99, **asked) as events:
                blocks: Any = (await events.get_final_message()).content
            async with responses.client.responses.stream(model="any", input=user) as events:
                items: Any = (await events.get_final_response()).output
        else:
            said = (await chat.client.chat.completions.create(**asked)).choices[0].message
            blocks = (await messages.client.messages.create(max_tokens=99, **asked)).content
            items = (await responses.client.responses.create(model="any", input=user)).output
        assert (said.reasoning_content, said.content) == ("hm", "a")
        assert (blocks[0].thinking, blocks[1].text) == ("hm", "b")
        assert (items[0].content[0].text, items[1].content[0].text) == ("hm", "c")
        for client in (chat, messages, responses):
            await client.close()
