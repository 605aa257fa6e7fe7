# SPDX-License-Identifier: Apache-2.0
"""OpenAI's responses. The gateway keeps none: each request has the whole input."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from ...errors import RequestRefused
from ..conversation import Message, ToolCall, parsed
from ..turns import Ask, Reply
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
    now,
    refuse,
    text_of,
    tool_of,
)
from .openai_chat import NEUTRAL, SAMPLING, called_tool, schema_of

PARAMETERS = Parameters(
    honoured=(
        "input",
        "model",
        "instructions",
        "stream",
        "max_output_tokens",
        "tools",
        "parallel_tool_calls",
    ),
    checked=("tool_choice", "text", "background", "top_logprobs"),
    refused=("prompt", *KEPT, *CONSTRAINTS),
    neutral=(
        *NEUTRAL,
        "stream_options",
        "background_options",
        "completion_window",
        "continuation_id",
        "betas",
    ),
    counted=(
        *SAMPLING,
        *OF_ENGINES,
        "reasoning",
        "truncation",
        "include",
        "max_tool_calls",
        "context_management",
        "moderation",
        "access_programs",
        "multi_agent",
        "image",
    ),
    of_tools=("type", "name", "description", "parameters"),
)
TEXTS = ("input_text", "output_text", "text", "refusal")
IGNORED = ("reasoning",)
FUNCTION, CUSTOM, SHELL = "function", "custom", "local_shell"
ARGUMENTS = {
    CUSTOM: {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]},
    SHELL: {
        "type": "object",
        "properties": {
            "command": {"type": "array", "items": {"type": "string"}},
            "working_directory": {"type": "string"},
            "timeout_ms": {"type": "integer"},
        },
        "required": ["command"],
    },
}
"""Of tools of other types, as functions, which is what the policy sees."""
CALLS = {"function_call": FUNCTION, "custom_tool_call": CUSTOM, "local_shell_call": SHELL}
OUTPUTS = tuple(f"{name}_output" for name in CALLS)
HOSTED = (
    "mcp",
    "web_search",
    "web_search_preview",
    "file_search",
    "code_interpreter",
    "image_generation",
)
"""Tools that OpenAI's servers run. The policy does not learn of them, and they are counted."""


class _Tool(msgspec.Struct):
    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Text(msgspec.Struct):
    format: dict[str, Any] | None = None
    verbosity: Any = None


class _Body(Stateless):
    input: str | list[dict[str, Any]]
    model: str = "policy"
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    tools: list[_Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: _Text | None = None
    background: bool | None = None
    top_logprobs: int | None = None


class OpenAIResponses:
    """`POST /v1/responses`."""

    path = "/v1/responses"
    parameters = PARAMETERS
    count_path = "/v1/responses/input_tokens"
    keep_alive = b": keep-alive\n\n"

    def read(self, body: bytes) -> Read:
        found = decoded(body, _Body)
        form = (found.text and found.text.format) or {}
        schema, call = schema_of(form, form, "text.format"), called_tool(found.tool_choice)
        refuse({"background": bool(found.background)}, "responses are not kept")
        refuse({"top_logprobs": bool(found.top_logprobs)}, "/v1/generate returns log-probs of tokens")
        items = [{"role": "user", "content": found.input}] if isinstance(found.input, str) else found.input
        messages: list[Message] = []
        if found.instructions:
            messages.append({"role": "system", "content": found.instructions})
        _append(messages, items)
        run_here = [one for one in found.tools or () if one.type not in HOSTED]
        tools = [] if found.tool_choice == "none" else [_tool(one) for one in run_here]
        given = ignored(body, PARAMETERS, one_call=found.parallel_tool_calls is False, hosted=HOSTED)
        if found.text is not None and found.text.verbosity is not None:
            given = (*given, "text.verbosity")
        ask = Ask(
            checked(messages),
            tools,
            found.max_output_tokens,
            overridden=given,
            form=form_of(schema, call, tools, ("text.format", "tool_choice")),
        )
        kinds = {_name(one): one.type for one in run_here if one.type != FUNCTION}
        return Read(ask, found.model, bool(found.stream), kinds=kinds)

    def read_input(self, body: bytes) -> Read:
        return self.read(body)

    def answer(self, read: Read, reply: Reply) -> bytes:
        return msgspec.json.encode(_response(read, reply, _output(read, reply)))

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
        if isinstance(kind, str) and kind in CALLS:
            if said is None:
                said = {"role": "assistant", "content": ""}
                messages.append(said)
            function = {"name": str(item.get("name", SHELL)), "arguments": _arguments(item)}
            call = {"id": str(item.get("call_id", "")), "type": "function", "function": function}
            said.setdefault("tool_calls", []).append(call)
            continue

        said = None
        if kind in OUTPUTS:
            content, call_id = item.get("output"), item.get("call_id") or item.get("id", "")
            result = {"role": "tool", "content": content_of(content, TEXTS), "tool_call_id": str(call_id)}
            messages.append(result)
        elif kind == "message":
            role = item.get("role")
            if role not in ("user", "assistant", "system", "developer"):
                raise RequestRefused(f"role must be user, assistant, system or developer, got {role!r}")
            content = (content_of if role == "user" else text_of)(item.get("content"), TEXTS)
            message = {"role": "system" if role == "developer" else role, "content": content}
            messages.append(message)
            said = message if role == "assistant" else None
        else:
            raise RequestRefused(f"input items of type {kind!r} are not supported")


def _arguments(item: Mapping[str, Any]) -> Any:
    """Return the arguments of a call, as the policy wrote them for a function."""
    if item["type"] == "custom_tool_call":
        return {"input": str(item.get("input", ""))}
    if item["type"] == "local_shell_call":
        action = item.get("action")
        given = action if isinstance(action, Mapping) else {}
        return {name: given[name] for name in ARGUMENTS[SHELL]["properties"] if given.get(name)}
    return parsed(item.get("arguments") or {})


def _tool(one: _Tool) -> dict[str, Any]:
    if one.type not in (FUNCTION, *ARGUMENTS):
        raise RequestRefused(
            f"a tool must be one of {FUNCTION}, {CUSTOM} and {SHELL}, which the agent runs, got {one.type!r}"
        )
    return tool_of(_name(one), one.description, ARGUMENTS.get(one.type, one.parameters))


def _name(one: _Tool) -> str:
    return SHELL if one.type == SHELL else one.name


def _output(read: Read, reply: Reply) -> list[dict[str, Any]]:
    output: list[dict[str, Any]] = []
    if reply.said.reasoning:
        content = [{"type": "reasoning_text", "text": reply.said.reasoning}]
        output.append({"type": "reasoning", "id": f"rs_{reply.id}", "summary": [], "content": content})
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
        item = {"id": f"fc_{reply.id}_{index}", "call_id": call.id, "status": "completed"}
        output.append({**item, **_call(read.kinds.get(call.name, FUNCTION), call)})
    return output


def _call(kind: str, call: ToolCall) -> dict[str, Any]:
    """Return a call as its item has it. What the policy wrote reaches the agent, also if it is malformed."""
    given = parsed(call.arguments)
    if kind == CUSTOM:
        text = given.get("input") if isinstance(given, dict) else None
        return {"type": "custom_tool_call", "name": call.name, "input": str(text or call.arguments)}
    if kind == SHELL:
        action = given if isinstance(given, dict) and isinstance(given.get("command"), list) else {}
        command = [str(word) for word in action.get("command", [call.arguments])]
        return {
            "type": "local_shell_call",
            "action": {"env": {}, **action, "type": "exec", "command": command},
        }
    return {"type": "function_call", "name": call.name, "arguments": call.arguments}


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
    output = _output(read, reply)
    for index, item in enumerate(output):
        if item["type"] == "message":
            yield from _text_events(index, item)
        elif item["type"] == "reasoning":
            yield from _reasoning_events(index, item)
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


def _reasoning_events(index: int, item: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    text = item["content"][0]["text"]
    at = {"item_id": item["id"], "output_index": index, "content_index": 0}
    yield "response.output_item.added", {"output_index": index, "item": {**item, "content": []}}
    yield "response.reasoning_text.delta", {**at, "delta": text}
    yield "response.reasoning_text.done", {**at, "text": text}
    yield "response.output_item.done", {"output_index": index, "item": item}


def _call_events(index: int, item: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    at = {"item_id": item["id"], "output_index": index}
    added = {**item, "status": "in_progress"}
    written = {"function_call": "arguments", "custom_tool_call": "input"}.get(item["type"])
    if written is not None:
        added[written] = ""
    yield "response.output_item.added", {"output_index": index, "item": added}
    if written is not None:
        name = {"arguments": "function_call_arguments", "input": "custom_tool_call_input"}[written]
        yield f"response.{name}.delta", {**at, "delta": item[written]}
        yield f"response.{name}.done", {**at, written: item[written], "name": item["name"]}
    yield "response.output_item.done", {"output_index": index, "item": item}


def _error(status: int, message: str) -> dict[str, Any]:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"message": message, "type": kind, "param": None, "code": None}
