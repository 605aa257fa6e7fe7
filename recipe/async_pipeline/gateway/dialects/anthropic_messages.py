# SPDX-License-Identifier: Apache-2.0
"""Anthropic's messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from ...errors import RequestRefused
from ..conversation import Message, parsed
from ..turns import ANY_TOOL, Ask, Reply
from ..wire import (
    CONSTRAINTS,
    KEPT,
    OF_ENGINES,
    Parameters,
    Read,
    Stateless,
    checked,
    content_of,
    decoded,
    event,
    form_of,
    ignored,
    refuse,
    text_of,
    texts,
    tool_of,
)

PARAMETERS = Parameters(
    honoured=("messages", "model", "system", "stream", "stop_sequences", "tools", "max_tokens"),
    checked=("tool_choice", "output_config", "output_format"),
    refused=("compaction", *KEPT, *CONSTRAINTS),
    neutral=(
        "metadata",
        "service_tier",
        "cache_control",
        "inference_geo",
        "user_profile_id",
        "workspace_id",
        "betas",
        "billing_policy",
        "fallback_credit_token",
    ),
    counted=(
        "temperature",
        "top_p",
        *OF_ENGINES,
        "thinking",
        "container",
        "mcp_servers",
        "context_management",
        "diagnostics",
        "fallbacks",
        "speed",
    ),
    of_tools=("type", "name", "description", "input_schema", "cache_control"),
    of_messages=("role", "content"),
)
CHOICES, FIELDS = ("auto", "none", "any", "tool"), ("output_config.format", "tool_choice")
HOSTED = ("web_search", "web_fetch", "code_execution", "tool_search_tool", "advisor", "mcp_toolset")
"""Beginnings of the types of tools that Anthropic's servers run: counted, and not shown to the policy."""
REASONING = ("thinking", "redacted_thinking")
INVALID = "invalid_json"
"""Holds what the policy wrote as arguments if it is not valid JSON: the wire has only mappings."""
FINISH = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    413: "request_too_large",
    410: "not_found_error",
}


class _Message(msgspec.Struct):
    role: str
    content: str | list[Any]


class _Tool(msgspec.Struct):
    name: str = ""
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None


class _Input(Stateless):
    messages: list[_Message]
    model: str = "policy"
    system: str | list[Any] | None = None
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    tools: list[_Tool] | None = None
    tool_choice: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    compaction: Any = None


class _Body(_Input, kw_only=True):
    max_tokens: int


class AnthropicMessages:
    """`POST /v1/messages`."""

    path = "/v1/messages"
    parameters = PARAMETERS
    count_path = "/v1/messages/count_tokens"
    keep_alive = event({"type": "ping"}, "ping")

    def read(self, body: bytes) -> Read:
        found = decoded(body, _Body)
        return self._read(found, found.max_tokens, body)

    def read_input(self, body: bytes) -> Read:
        return self._read(decoded(body, _Input), None, body)

    def _read(self, found: _Input, max_tokens: int | None, body: bytes) -> Read:
        choice = (found.tool_choice or {}).get("type", "auto")
        alone = (found.tool_choice or {}).get("disable_parallel_tool_use") is True
        refuse({"compaction": found.compaction is not None}, "ask for a summary in a message")
        refuse({"tool_choice": choice not in CHOICES}, f"the choices are {', '.join(CHOICES)}")
        output = dict(found.output_config or {})
        form = output.pop("format", None) or found.output_format
        named = form is not None and form.get("type") == "json_schema"
        refuse({"output_config.format": form is not None and not named}, "the format is json_schema")
        call = {"any": ANY_TOOL, "tool": str((found.tool_choice or {}).get("name"))}.get(choice)
        given = found.tools or ()
        hosted = [one.type for one in given if one.type is not None and one.type.startswith(HOSTED)]
        tools = [] if choice == "none" else [_tool(one) for one in given if one.type not in hosted]
        of_output = [f"output_config.{name}" for name, value in output.items() if value is not None]
        messages: list[Message] = []
        if found.system:
            messages.append({"role": "system", "content": text_of(found.system)})
        for one in found.messages:
            messages += _messages(one)
        ask = Ask(
            checked(messages),
            tools,
            max_tokens,
            texts(found.stop_sequences),
            (*ignored(body, PARAMETERS, one_call=alone, hosted=hosted), *of_output),
            form=form_of((form or {}).get("schema", () if form else None), call, tools, FIELDS),
        )
        return Read(ask, found.model, bool(found.stream))

    def answer(self, read: Read, reply: Reply) -> bytes:
        usage = {"input_tokens": reply.prompt_tokens, "output_tokens": reply.tokens}
        body = _head(read, reply) | {"content": _blocks(reply), "usage": usage} | _stopped(reply)
        return msgspec.json.encode(body)

    def events(self, read: Read, reply: Reply) -> Iterator[bytes]:
        stopped: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}
        usage = {"input_tokens": reply.prompt_tokens, "output_tokens": 0}
        message = _head(read, reply) | {"content": [], "usage": usage} | stopped
        yield event({"type": "message_start", "message": message}, "message_start")
        for index, block in enumerate(_blocks(reply)):
            delta: dict[str, Any]
            if block["type"] == "text":
                begun = {**block, "text": ""}
                delta = {"type": "text_delta", "text": block["text"]}
            elif block["type"] == "thinking":
                begun = {**block, "thinking": ""}
                delta = {"type": "thinking_delta", "thinking": block["thinking"]}
            else:
                begun = {**block, "input": {}}
                written = msgspec.json.encode(block["input"]).decode()
                delta = {"type": "input_json_delta", "partial_json": written}
            for name, more in (
                ("content_block_start", {"content_block": begun}),
                ("content_block_delta", {"delta": delta}),
                ("content_block_stop", {}),
            ):
                yield event({"type": name, "index": index, **more}, name)
        end = {"type": "message_delta", "delta": _stopped(reply), "usage": {"output_tokens": reply.tokens}}
        yield event(end, "message_delta")
        yield event({"type": "message_stop"}, "message_stop")

    def error(self, status: int, message: str) -> bytes:
        return msgspec.json.encode(_error(status, message))

    def error_event(self, status: int, message: str) -> bytes:
        return event(_error(status, message), "error")


def _messages(one: _Message) -> Iterator[Message]:
    """Yield the messages that a chat template has for one message: results of tools are single ones."""
    if one.role not in ("user", "assistant", "system"):
        raise RequestRefused(f"role must be user or assistant, got {one.role!r}")
    if isinstance(one.content, str):
        yield {"role": one.role, "content": one.content}
        return

    texts: list[Any] = []
    calls: list[dict[str, Any]] = []
    for block in one.content:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_result":
            content = content_of(block.get("content"))
            yield {"role": "tool", "content": content, "tool_call_id": str(block.get("tool_use_id", ""))}
        elif kind == "tool_use":
            given = block.get("input") or {}
            if not isinstance(given, Mapping):
                raise RequestRefused(f"input of a tool_use must be an object, got {type(given).__name__}")
            function = {"name": str(block.get("name", "")), "arguments": parsed(given.get(INVALID, given))}
            calls.append({"id": str(block.get("id", "")), "type": "function", "function": function})
        elif kind not in REASONING:
            texts.append(block)
    if texts or calls or not one.content:
        read = content_of if one.role == "user" else text_of
        message: Message = {"role": one.role, "content": read(texts)}
        yield {**message, "tool_calls": calls} if calls else message


def _tool(one: _Tool) -> dict[str, Any]:
    if one.type not in (None, "custom"):
        raise RequestRefused(f"a tool must be a custom one, got {one.type!r}")
    return tool_of(one.name, one.description, one.input_schema)


def _head(read: Read, reply: Reply) -> dict[str, Any]:
    return {"id": f"msg_{reply.id}", "type": "message", "role": "assistant", "model": read.model}


def _blocks(reply: Reply) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if reply.said.reasoning:
        blocks.append({"type": "thinking", "thinking": reply.said.reasoning, "signature": ""})
    if reply.said.text or not reply.said.calls:
        blocks.append({"type": "text", "text": reply.said.text})
    for call in reply.said.calls:
        given = parsed(call.arguments)
        value = given if isinstance(given, dict) else {INVALID: given}
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": value})
    return blocks


def _stopped(reply: Reply) -> dict[str, Any]:
    stop = reply.said.stop
    return {"stop_reason": FINISH[reply.finish] if stop is None else "stop_sequence", "stop_sequence": stop}


def _error(status: int, message: str) -> dict[str, Any]:
    kind = ERRORS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    error: dict[str, Any] = {"type": kind, "message": message}
    if message.startswith("thread:"):
        # With this code, Anthropic's client sends the whole conversation in this and all further requests.
        error["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return {"type": "error", "error": error}
