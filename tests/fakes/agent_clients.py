# SPDX-License-Identifier: Apache-2.0
"""The real clients of OpenAI and Anthropic behind one method, whole and streamed.

A conversation is a list of entries: ("system", text), ("user", text), ("assistant", text, calls) and
("tool", call id, text); a call is (id, name, arguments).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import anthropic
import openai

Entry = tuple[Any, ...]
ADD = {
    "type": "object",
    "properties": {"x": {"type": "integer", "description": "a number"}},
    "required": ["x"],
}


class Turn(NamedTuple):
    """What a client returned."""

    text: str
    calls: list[tuple[str, str, dict[str, Any]]]
    finish: str
    """stop, length or calls."""
    prompt_tokens: int
    tokens: int

    def entry(self) -> Entry:
        return ("assistant", self.text, self.calls)


class AgentClient(Protocol):
    """One API of one client."""

    async def say(self, entries: Sequence[Entry], *, max_tokens: int = 1000, tools: bool = False) -> Turn:
        """Request a turn."""

    async def close(self) -> None:
        """Close its connections."""


def options(url: str, key: str, more: dict[str, Any]) -> dict[str, Any]:
    return {"api_key": key, "timeout": 20.0, **more, "base_url": url}


class Chat:
    """OpenAI's chat completions."""

    def __init__(self, url: str, key: str, *, stream: bool = False, **more: Any) -> None:
        self.client = openai.AsyncOpenAI(**options(f"{url}/v1", key, more))
        self.stream = stream

    async def close(self) -> None:
        await self.client.close()

    def messages(self, entries: Sequence[Entry]) -> list[dict[str, Any]]:
        found = []
        for entry in entries:
            message: dict[str, Any] = {"role": entry[0], "content": entry[-1]}
            if entry[0] == "assistant":
                message["content"] = entry[1] or None
                if entry[2]:
                    message["tool_calls"] = [
                        {"id": i, "type": "function", "function": {"name": n, "arguments": json.dumps(a)}}
                        for i, n, a in entry[2]
                    ]
            if entry[0] == "tool":
                message["tool_call_id"] = entry[1]
            found.append(message)
        return found

    async def say(self, entries: Sequence[Entry], *, max_tokens: int = 1000, tools: bool = False) -> Turn:
        add = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": ADD}}
        given: dict[str, Any] = {"tools": [add]} if tools else {}
        asked: dict[str, Any] = {"model": "any", "messages": self.messages(entries), **given}
        asked["max_tokens"] = max_tokens
        if not self.stream:
            answer: Any = await self.client.chat.completions.create(**asked)
        else:
            asked["stream_options"] = {"include_usage": True}
            try:
                async with self.client.chat.completions.stream(**asked) as events:
                    answer = await events.get_final_completion()
            except openai.LengthFinishReasonError as error:
                answer = error.completion
        choice = answer.choices[0]
        calls = [
            (one.id, one.function.name, json.loads(one.function.arguments))
            for one in choice.message.tool_calls or ()
        ]
        finish = {"tool_calls": "calls"}.get(choice.finish_reason, choice.finish_reason)
        usage = answer.usage
        return Turn(choice.message.content or "", calls, finish, usage.prompt_tokens, usage.completion_tokens)


class Responses(Chat):
    """OpenAI's responses."""

    async def say(self, entries: Sequence[Entry], *, max_tokens: int = 1000, tools: bool = False) -> Turn:
        items: list[dict[str, Any]] = []
        for entry in entries:
            if entry[0] == "tool":
                items.append({"type": "function_call_output", "call_id": entry[1], "output": entry[2]})
            elif entry[0] != "assistant":
                items.append({"role": entry[0], "content": entry[1]})
            else:
                if entry[1]:
                    part = {"type": "output_text", "text": entry[1], "annotations": []}
                    items.append({"type": "message", "role": "assistant", "content": [part]})
                for call_id, name, arguments in entry[2]:
                    call = {"call_id": call_id, "name": name, "arguments": json.dumps(arguments)}
                    items.append({"type": "function_call", **call})
        add = {"type": "function", "name": "add", "description": "Adds.", "parameters": ADD}
        given: dict[str, Any] = {"tools": [add]} if tools else {}
        asked: dict[str, Any] = {"model": "any", "input": items, "max_output_tokens": max_tokens, **given}
        if not self.stream:
            answer: Any = await self.client.responses.create(**asked)
        else:
            async with self.client.responses.stream(**asked) as events:
                last: Any = None
                async for event in events:
                    last = event
                assert last.type in ("response.completed", "response.incomplete")
                answer = last.response
        calls = [
            (one.call_id, one.name, json.loads(one.arguments))
            for one in answer.output
            if one.type == "function_call"
        ]
        finish = "length" if answer.status == "incomplete" else "calls" if calls else "stop"
        usage = answer.usage
        return Turn(answer.output_text, calls, finish, usage.input_tokens, usage.output_tokens)


class Messages:
    """Anthropic's messages."""

    def __init__(self, url: str, key: str, *, stream: bool = False, **more: Any) -> None:
        self.client = anthropic.AsyncAnthropic(**options(url, key, more))
        self.stream = stream

    async def close(self) -> None:
        await self.client.close()

    async def say(self, entries: Sequence[Entry], *, max_tokens: int = 1000, tools: bool = False) -> Turn:
        messages: list[dict[str, Any]] = []
        system = [entry[1] for entry in entries if entry[0] == "system"]
        for entry in entries:
            if entry[0] == "user":
                messages.append({"role": "user", "content": entry[1]})
            elif entry[0] == "tool":
                result = {"type": "tool_result", "tool_use_id": entry[1], "content": entry[2]}
                messages.append({"role": "user", "content": [result]})
            elif entry[0] == "assistant":
                blocks: list[dict[str, Any]] = [{"type": "text", "text": entry[1]}] if entry[1] else []
                for call_id, name, given in entry[2]:
                    blocks.append({"type": "tool_use", "id": call_id, "name": name, "input": given})
                messages.append({"role": "assistant", "content": blocks})
        asked: dict[str, Any] = {"model": "any", "messages": messages, "max_tokens": max_tokens}
        if system:
            asked["system"] = system[0]
        if tools:
            asked["tools"] = [{"name": "add", "description": "Adds.", "input_schema": ADD}]
        if not self.stream:
            answer: Any = await self.client.messages.create(**asked)
        else:
            async with self.client.messages.stream(**asked) as events:
                answer = await events.get_final_message()
        text = "".join(block.text for block in answer.content if block.type == "text")
        calls = [(one.id, one.name, one.input) for one in answer.content if one.type == "tool_use"]
        finish = {"end_turn": "stop", "max_tokens": "length", "tool_use": "calls"}[answer.stop_reason]
        return Turn(text, calls, finish, answer.usage.input_tokens, answer.usage.output_tokens)


CLIENTS: dict[str, Any] = {"chat": Chat, "responses": Responses, "messages": Messages}
STATUS_ERRORS: Any = (openai.APIStatusError, anthropic.APIStatusError)
