# SPDX-License-Identifier: Apache-2.0
"""OpenAI's responses. The gateway keeps none: each request has the whole input."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from ...errors import RequestRefused
from ..conversation import Message, parsed
from ..sessions import Ask, Reply
from ..wire import CHANGES_SAMPLING, Read, checked, decoded, event, now, overridden, refuse, text_of, tool_of

SAMPLING = ("temperature", "top_p")
TEXTS = ("input_text", "output_text", "text", "refusal")
IGNORED = ("reasoning",)


class _Tool(msgspec.Struct):
    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Format(msgspec.Struct):
    type: str = "text"


class _Text(msgspec.Struct):
    format: _Format | None = None


class _Body(msgspec.Struct):
    input: str | list[dict[str, Any]]
    model: str = "policy"
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    tools: list[_Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: _Text | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    temperature: float | None = None
    top_p: float | None = None


class OpenAIResponses:
    """`POST /v1/responses`."""

    path = "/v1/responses"
    keep_alive = b": keep-alive\n\n"

    def read(self, body: bytes) -> Read:
        found = decoded(body, _Body)
        choice = found.tool_choice
        form = (found.text and found.text.format) or _Format()
        refuse(
            {
                "text.format": form.type != "text",
                "tool_choice": found.tool_choice not in (None, "auto", "none"),
            },
            CHANGES_SAMPLING,
        )
        refuse(
            {
                "previous_response_id": found.previous_response_id is not None,
                "conversation": found.conversation is not None,
                "background": bool(found.background),
            },
            "responses are not kept; send the whole input",
        )
        items = [{"role": "user", "content": found.input}] if isinstance(found.input, str) else found.input
        messages: list[Message] = []
        if found.instructions:
            messages.append({"role": "system", "content": found.instructions})
        _append(messages, items)
        tools = [] if choice == "none" else [_tool(one) for one in found.tools or ()]
        given = overridden(found, SAMPLING, one_call=found.parallel_tool_calls is False)
        ask = Ask(checked(messages), tools, found.max_output_tokens, (), given)
        return Read(ask, found.model, bool(found.stream))

    def answer(self, read: Read, reply: Reply) -> bytes:
        return msgspec.json.encode(_response(read, reply, _output(reply)))

    def events(self, read: Read, reply: Reply) -> Iterator[bytes]:
        for number, (name, data) in enumerate(_events(read, reply)):
            yield event({"type": name, "sequence_number": number, **data}, name)

    def error(self, status: int, message: str) -> bytes:
        return msgspec.json.encode({"error": _error(status, message)})

    def error_event(self, status: int, message: str) -> bytes:
        found = _error(status, message)
        # Clients read the fields of the event, or the object below `error`.
        return event({**found, "type": "error", "sequence_number": 0, "error": found}, "error")


def _append(messages: list[Message], items: list[dict[str, Any]]) -> None:
    """Append the messages of input items: text and calls of one turn are one message."""
    said: Message | None = None
    for item in items:
        kind = item.get("type", "message")
        if kind in IGNORED:
            continue
        if kind == "function_call":
            if said is None:
                said = {"role": "assistant", "content": ""}
                messages.append(said)
            function = {"name": str(item.get("name", "")), "arguments": parsed(item.get("arguments") or {})}
            call = {"id": str(item.get("call_id", "")), "type": "function", "function": function}
            said.setdefault("tool_calls", []).append(call)
            continue

        said = None
        if kind == "function_call_output":
            content = text_of(item.get("output"), TEXTS)
            messages.append(
                {"role": "tool", "content": content, "tool_call_id": str(item.get("call_id", ""))}
            )
        elif kind == "message":
            role = item.get("role")
            if role not in ("user", "assistant", "system", "developer"):
                raise RequestRefused(f"role must be user, assistant, system or developer, got {role!r}")
            content = text_of(item.get("content"), TEXTS)
            message = {"role": "system" if role == "developer" else role, "content": content}
            messages.append(message)
            said = message if role == "assistant" else None
        else:
            raise RequestRefused(f"input items of type {kind!r} are not supported")


def _tool(one: _Tool) -> dict[str, Any]:
    if one.type != "function":
        raise RequestRefused(f"a tool must be a function, got {one.type!r}")
    return tool_of(one.name, one.description, one.parameters)


def _output(reply: Reply) -> list[dict[str, Any]]:
    output: list[dict[str, Any]] = []
    if reply.said.text or not reply.said.calls:
        part = {"type": "output_text", "text": reply.said.text, "annotations": []}
        output.append(
            {
                "type": "message",
                "id": f"msg_{reply.id}",
                "status": "completed",
                "role": "assistant",
                "content": [part],
            }
        )
    for index, call in enumerate(reply.said.calls):
        output.append(
            {
                "type": "function_call",
                "id": f"fc_{reply.id}_{index}",
                "call_id": call.id,
                "name": call.name,
                "arguments": call.arguments,
                "status": "completed",
            }
        )
    return output


def _response(
    read: Read, reply: Reply, output: list[dict[str, Any]], status: str | None = None
) -> dict[str, Any]:
    cut = reply.finish == "length"
    usage = {
        "input_tokens": reply.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": reply.tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.prompt_tokens + reply.tokens,
    }
    return {
        "id": f"resp_{reply.id}",
        "object": "response",
        "created_at": now(),
        "status": status or ("incomplete" if cut else "completed"),
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut and status is None else None,
        "instructions": None,
        "metadata": {},
        "model": read.model,
        "output": output,
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "usage": usage if status is None else None,
    }


def _events(read: Read, reply: Reply) -> Iterator[tuple[str, dict[str, Any]]]:
    begun = _response(read, reply, [], "in_progress")
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    output = _output(reply)
    for index, item in enumerate(output):
        if item["type"] == "message":
            yield from _text_events(index, item)
        else:
            yield from _call_events(index, item)
    done = "response.incomplete" if reply.finish == "length" else "response.completed"
    yield done, {"response": _response(read, reply, output)}


def _text_events(index: int, item: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    part = item["content"][0]
    at = {"item_id": item["id"], "output_index": index, "content_index": 0}
    added = {**item, "status": "in_progress", "content": []}
    yield "response.output_item.added", {"output_index": index, "item": added}
    yield "response.content_part.added", {**at, "part": {**part, "text": ""}}
    yield "response.output_text.delta", {**at, "delta": part["text"], "logprobs": []}
    yield "response.output_text.done", {**at, "text": part["text"], "logprobs": []}
    yield "response.content_part.done", {**at, "part": part}
    yield "response.output_item.done", {"output_index": index, "item": item}


def _call_events(index: int, item: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    at = {"item_id": item["id"], "output_index": index}
    added = {**item, "status": "in_progress", "arguments": ""}
    done = {"arguments": item["arguments"], "name": item["name"]}
    yield "response.output_item.added", {"output_index": index, "item": added}
    yield "response.function_call_arguments.delta", {**at, "delta": item["arguments"]}
    yield "response.function_call_arguments.done", {**at, **done}
    yield "response.output_item.done", {"output_index": index, "item": item}


def _error(status: int, message: str) -> dict[str, Any]:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"message": message, "type": kind, "param": None, "code": None}
