# SPDX-License-Identifier: Apache-2.0
"""OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from ...errors import RequestRefused
from ..conversation import Message, parsed
from ..sessions import Ask, Reply
from ..wire import (
    CHANGES_SAMPLING,
    Read,
    arguments_of,
    checked,
    decoded,
    event,
    now,
    overridden,
    refuse,
    text_of,
    texts,
    tool_of,
)

SAMPLING = ("temperature", "top_p", "top_k", "seed", "frequency_penalty", "presence_penalty", "min_p")
ROLES = ("system", "developer", "user", "assistant", "tool")


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


class _Tool(msgspec.Struct):
    function: _Function
    type: str = "function"


class _Body(msgspec.Struct):
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
    functions: list[Any] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None


class OpenAIChat:
    """`POST /v1/chat/completions`."""

    path = "/v1/chat/completions"
    keep_alive = b": keep-alive\n\n"

    def read(self, body: bytes) -> Read:
        found = decoded(body, _Body)
        form = (found.response_format or {}).get("type", "text")
        refuse(
            {
                "n": found.n not in (None, 1),
                "response_format": form != "text",
                "logit_bias": bool(found.logit_bias),
                "tool_choice": found.tool_choice not in (None, "auto", "none"),
            },
            CHANGES_SAMPLING,
        )
        refuse({"logprobs": bool(found.logprobs)}, "/v1/generate returns log-probs and versions of tokens")
        refuse({"functions": bool(found.functions)}, "tools replaced them")
        limit = found.max_tokens if found.max_completion_tokens is None else found.max_completion_tokens
        ask = Ask(
            checked([_message(one) for one in found.messages]),
            [] if found.tool_choice == "none" else [_tool(one) for one in found.tools or ()],
            limit,
            texts(found.stop),
            overridden(found, SAMPLING, one_call=found.parallel_tool_calls is False),
        )
        usage = bool((found.stream_options or {}).get("include_usage"))
        return Read(ask, found.model, bool(found.stream), usage)

    def answer(self, read: Read, reply: Reply) -> bytes:
        choice = {"index": 0, "message": _said(reply), "logprobs": None, "finish_reason": reply.finish}
        body = {**_head(read, reply, "chat.completion"), "choices": [choice], "usage": _usage(reply)}
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
            yield event({**head, "choices": [], "usage": _usage(reply)})
        yield b"data: [DONE]\n\n"

    def error(self, status: int, message: str) -> bytes:
        return msgspec.json.encode(_error(status, message))

    def error_event(self, status: int, message: str) -> bytes:
        return event(_error(status, message))


def _message(one: _Message) -> Message:
    if one.role not in ROLES:
        raise RequestRefused(f"role must be one of {', '.join(ROLES)}, got {one.role!r}")
    message: Message = {
        "role": "system" if one.role == "developer" else one.role,
        "content": text_of(one.content, ("text", "refusal")),
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
    if one.tool_call_id is not None:
        message["tool_call_id"] = one.tool_call_id
    return message


def _tool(one: _Tool) -> dict[str, Any]:
    if one.type != "function":
        raise RequestRefused(f"a tool must be a function, got {one.type!r}")
    return tool_of(one.function.name, one.function.description, one.function.parameters)


def _said(reply: Reply) -> dict[str, Any]:
    said: dict[str, Any] = {"role": "assistant", "content": reply.said.text}
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


def _usage(reply: Reply) -> dict[str, int]:
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
