# SPDX-License-Identifier: Apache-2.0
"""OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from ...errors import RequestRefused
from ..conversation import Message, parsed
from ..turns import ANY_TOOL, Ask, Reply
from ..wire import (
    CHANGES_SAMPLING,
    CONSTRAINTS,
    KEPT,
    OF_ENGINES,
    Parameters,
    Read,
    Stateless,
    arguments_of,
    checked,
    content_of,
    decoded,
    event,
    form_of,
    ignored,
    now,
    refuse,
    text_of,
    texts,
    tool_of,
)

SAMPLING = ("temperature", "top_p", "seed", "frequency_penalty", "presence_penalty")
NEUTRAL = (
    "metadata",
    "user",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
)
PARAMETERS = Parameters(
    honoured=(
        "messages",
        "model",
        "stream",
        "stream_options",
        "max_tokens",
        "max_completion_tokens",
        "stop",
        "tools",
        "parallel_tool_calls",
    ),
    checked=(
        "n",
        "response_format",
        "logit_bias",
        "logprobs",
        "top_logprobs",
        "functions",
        "tool_choice",
        "modalities",
    ),
    refused=("audio", "function_call", *KEPT, *CONSTRAINTS),
    neutral=(*NEUTRAL, "prediction"),
    counted=(*SAMPLING, *OF_ENGINES, "reasoning_effort", "verbosity", "web_search_options", "moderation"),
    of_tools=("type", "function", "name", "description", "parameters", "arguments"),
    of_messages=("role", "content", "tool_calls", "tool_call_id", "reasoning_content"),
)
ROLES = ("system", "developer", "user", "assistant", "tool")
SEEING = ("user", "tool")
"""Roles whose messages may have pictures."""


class _Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Call(msgspec.Struct):
    function: _Function
    id: str = ""


class _Message(msgspec.Struct):
    role: str
    content: str | list[Any] | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class _Tool(msgspec.Struct):
    function: _Function
    type: str = "function"


class _Body(Stateless):
    messages: list[_Message]
    model: str = "policy"
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    tools: list[_Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    n: int | None = None
    response_format: dict[str, Any] | None = None
    logit_bias: dict[str, float] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    modalities: list[str] | None = None
    functions: list[Any] | None = None


class OpenAIChat:
    """`POST /v1/chat/completions`."""

    path = "/v1/chat/completions"
    parameters = PARAMETERS
    keep_alive = b": keep-alive\n\n"

    def read(self, body: bytes) -> Read:
        found = decoded(body, _Body)
        named = {"n": found.n not in (None, 1), "logit_bias": bool(found.logit_bias)}
        refuse(named, CHANGES_SAMPLING)
        refuse({"modalities": any(one != "text" for one in found.modalities or ())}, "the policy writes text")
        named = {"logprobs": bool(found.logprobs), "top_logprobs": bool(found.top_logprobs)}
        refuse(named, "/v1/generate returns log-probs and versions of tokens")
        refuse({"functions": bool(found.functions)}, "tools replaced them")
        limit = found.max_tokens if found.max_completion_tokens is None else found.max_completion_tokens
        tools = [] if found.tool_choice == "none" else [_tool(one) for one in found.tools or ()]
        form = found.response_format or {}
        schema = schema_of(form, form.get("json_schema"), "response_format")
        call = called_tool(found.tool_choice)
        ask = Ask(
            checked([_message(one) for one in found.messages]),
            tools,
            limit,
            texts(found.stop),
            ignored(body, PARAMETERS, one_call=found.parallel_tool_calls is False),
            form=form_of(schema, call, tools, ("response_format", "tool_choice")),
        )
        usage = bool((found.stream_options or {}).get("include_usage"))
        return Read(ask, found.model, bool(found.stream), usage)

    def answer(self, read: Read, reply: Reply) -> bytes:
        choice = {"index": 0, "message": _said(reply), "logprobs": None, "finish_reason": reply.finish}
        body = {**_head(read, reply, "chat.completion"), "choices": [choice], "usage": usage_of(reply)}
        return msgspec.json.encode(body)

    def events(self, read: Read, reply: Reply) -> Iterator[bytes]:
        head = _head(read, reply, "chat.completion.chunk")
        said = _said(reply)
        for index, call in enumerate(said.get("tool_calls") or ()):
            call["index"] = index
        for delta, finish in ((said, None), ({}, reply.finish)):
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
            yield event({**head, "choices": [choice]})
        if read.usage:
            yield event({**head, "choices": [], "usage": usage_of(reply)})
        yield b"data: [DONE]\n\n"

    def error(self, status: int, message: str) -> bytes:
        return msgspec.json.encode(_error(status, message))

    def error_event(self, status: int, message: str) -> bytes:
        return event(_error(status, message))


def schema_of(form: Mapping[str, Any], holder: Any, field: str) -> Any:
    """Return the JSON Schema of a format, or None for a text; `holder` has it as `schema`.

    Raises RequestRefused for other formats.
    """
    kind = form.get("type", "text")
    if kind == "json_schema":
        return (holder.get("schema") if isinstance(holder, Mapping) else None) or ()
    refuse({field: kind not in ("text", "json_object")}, "the formats are text, json_object and json_schema")
    return {"type": "object"} if kind == "json_object" else None


def called_tool(choice: str | dict[str, Any] | None) -> str | None:
    """Return the tool that an answer must call, as `form_of` takes it.

    Raises RequestRefused for a choice that is unknown.
    """
    if choice in (None, "auto", "none"):
        return None
    if choice == "required":
        return ANY_TOOL
    found = choice if isinstance(choice, dict) else {}
    name = (found.get("function") or found).get("name") if found.get("type") == "function" else None
    refuse({"tool_choice": not isinstance(name, str)}, "the choices are auto, none, required and a function")
    return str(name)


def _message(one: _Message) -> Message:
    if one.role not in ROLES:
        raise RequestRefused(f"role must be one of {', '.join(ROLES)}, got {one.role!r}")
    message: Message = {
        "role": "system" if one.role == "developer" else one.role,
        "content": (content_of if one.role in SEEING else text_of)(one.content, ("text", "refusal")),
    }
    if one.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": parsed(call.function.arguments or {})},
            }
            for call in one.tool_calls
        ]
    if one.reasoning_content:
        message["reasoning_content"] = one.reasoning_content
    if one.tool_call_id is not None:
        message["tool_call_id"] = one.tool_call_id
    return message


def _tool(one: _Tool) -> dict[str, Any]:
    if one.type != "function":
        raise RequestRefused(f"a tool must be a function, got {one.type!r}")
    return tool_of(one.function.name, one.function.description, one.function.parameters)


def _said(reply: Reply) -> dict[str, Any]:
    said: dict[str, Any] = {"role": "assistant", "content": reply.said.text}
    if reply.said.reasoning:
        said["reasoning_content"] = reply.said.reasoning
    if reply.said.calls:
        said["content"] = reply.said.text or None
        said["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": arguments_of(call.arguments)},
            }
            for call in reply.said.calls
        ]
    return said


def _head(read: Read, reply: Reply, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{reply.id}", "object": kind, "created": now(), "model": read.model}


def usage_of(reply: Reply) -> dict[str, int]:
    """Return the number of tokens of a request and its answer."""
    total = reply.prompt_tokens + reply.tokens
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.tokens,
        "total_tokens": total,
    }


def _error(status: int, message: str) -> dict[str, Any]:
    code = "context_length_exceeded" if message.startswith("context_length_exceeded") else None
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
