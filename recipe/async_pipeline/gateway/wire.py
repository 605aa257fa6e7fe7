# SPDX-License-Identifier: Apache-2.0
"""What a dialect is: how one API writes requests, answers, streams and errors.

A dialect is pure: it reads a body and writes bytes. Keys, retries, deadlines and tokens are the same for all
of them, and so are the tests (`tests/gateway/test_dialects.py`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from ..errors import RequestRefused
from .conversation import PICTURES, Message, check_depth, picture_of
from .turns import Ask, Form, Reply

T = TypeVar("T")


class Read(NamedTuple):
    """A request, and what its answer has to repeat."""

    ask: Ask
    model: str
    """The name that the agent uses for the policy."""
    stream: bool
    usage: bool = True
    """A stream ends with the number of tokens."""
    kinds: Mapping[str, str] = {}
    """Tools that are no functions in the dialect, by name, with their type."""


class Parameters(NamedTuple):
    """What a dialect does with the parameters of a request. Other ones are counted by their names."""

    honoured: tuple[str, ...]
    checked: tuple[str, ...]
    """Refused with values that cannot be honoured."""
    refused: tuple[str, ...]
    neutral: tuple[str, ...]
    """They ask for nothing that the answer would show."""
    counted: tuple[str, ...]
    """Known ones that are counted."""
    of_tools: tuple[str, ...] = ()
    """Parts of a tool that are read, or ask for nothing. Other ones are counted."""
    of_messages: tuple[str, ...] = ()
    """The same of a message."""


class Dialect(Protocol):
    """One API."""

    path: str
    """Of its requests."""
    parameters: Parameters
    """What it does with the parameters of a request."""
    keep_alive: bytes
    """An event that clients ignore."""

    def read(self, body: bytes) -> Read:
        """Return the request in a body. Raises RequestRefused, which names the field."""

    def answer(self, read: Read, reply: Reply) -> bytes:
        """Return the body of an answer."""

    def events(self, read: Read, reply: Reply) -> Iterator[bytes]:
        """Yield the server-sent events of an answer that is complete."""

    def error(self, status: int, message: str) -> bytes:
        """Return the body of an error."""

    def error_event(self, status: int, message: str) -> bytes:
        """Return the event of an error in a stream that has begun."""


class CountingDialect(Dialect, Protocol):
    """An API that also tells how many tokens a request has."""

    count_path: str
    """Of requests for that."""

    def read_input(self, body: bytes) -> Read:
        """Return the request in such a body. Raises as `read`."""


class Stateless(msgspec.Struct, kw_only=True):
    """A body of an API whose servers may keep conversations. It has the fields that refer to one."""

    thread: Any = None
    previous_response_id: Any = None
    conversation: Any = None
    session_params: Any = None


KEPT = Stateless.__struct_fields__
"""Parameters of Anthropic, OpenAI and SGLang that refer to a conversation of the server."""


def decoded(body: bytes, kind: type[T]) -> T:
    """Return a body as the struct `kind`.

    Raises RequestRefused, which names the field, also for a conversation that the server would have to keep:
    its prompt would lack everything that the request leaves out.
    """
    try:
        found = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise RequestRefused(f"invalid request: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestRefused(f"the body is not valid JSON: {error}") from error
    if isinstance(found, Stateless):
        why = "the gateway keeps no conversations; send the whole one in each request"
        refuse({name: getattr(found, name) is not None for name in KEPT}, why)
    return found


CONSTRAINTS = (
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
    "logits_processors",
)
"""Parameters of vLLM and SGLang that constrain the answer."""
OF_ENGINES = (
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "chat_template_kwargs",
    "return_token_ids",
    "continue_final_message",
)
"""Further parameters of these servers."""
MAX_NAMES, MAX_NAME = 32, 64
"""Bounds of the names that are counted for a request, and of the characters of each."""


ASKS_NOTHING = (None, False, {"type": "text"})
"""Values of parts of tools."""
EMPTY_VALUES = (b"null", b"false", b"[]", b"{}", b'""')
"""Values of parts of messages that say nothing, which clients send back."""


def ignored(
    body: bytes, known: Parameters, *, one_call: bool = False, hosted: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return the parameters of a body, and parts of its tools and messages, that have no effect.

    `one_call`: it asks for one tool call at most; `hosted`: types of tools that are left out. Raises
    RequestRefused for `known.refused`.
    """
    values = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    given = [name for name, value in values.items() if bytes(value) != b"null"]
    refuse({name: True for name in given if name in known.refused}, CHANGES_SAMPLING)
    read = {*known.honoured, *known.checked, *known.neutral}
    names = [name for name in given if name not in read]
    if known.of_tools and "tools" in given:
        names += sorted(_unread(msgspec.json.decode(values["tools"]), known.of_tools, hosted))
    if known.of_messages and "messages" in given:
        messages = msgspec.json.decode(values["messages"], type=list[dict[str, msgspec.Raw]])
        parts = {name for one in messages for name, part in one.items() if bytes(part) not in EMPTY_VALUES}
        names += sorted(f"messages.{name}" for name in parts.difference(known.of_messages))
    names = [name[:MAX_NAME] for name in names][:MAX_NAMES]
    return (*names, *(["parallel_tool_calls"] if one_call else []))


def _unread(tools: Iterable[Mapping[str, Any]], read: Sequence[str], hosted: Sequence[str]) -> set[str]:
    found = set()
    for tool in tools:
        inner = tool.get("function")
        parts = {**tool, **(inner if isinstance(inner, Mapping) else {})}
        if (kind := tool.get("type")) in hosted:
            parts = {str(kind): True}
        found |= {name for name, one in parts.items() if name not in read and one not in ASKS_NOTHING}
    return {f"tools.{name}" for name in found}


def event(data: Any, name: str | None = None) -> bytes:
    """Return a server-sent event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"


def now() -> int:
    """Return the time of day in seconds, as APIs name it `created`."""
    return int(time.time())


def refuse(reasons: Mapping[str, bool], why: str) -> None:
    """Raises RequestRefused for the fields that a request has and that cannot be honoured."""
    found = [name for name, given in reasons.items() if given]
    if found:
        raise RequestRefused(f"{', '.join(found)}: {why}; leave it out")


def form_of(
    schema: Any, choice: Any, tools: Sequence[Mapping[str, Any]], fields: tuple[str, str]
) -> Form | None:
    """Return the form that an answer must have, or None if it may be any text.

    `schema`: of the answer, or None; `choice`: the name of a tool that it must call, ANY_TOOL, or None;
    `fields`: the names of both in the dialect. Raises RequestRefused if there is no such tool, or no schema.
    """
    of_schema, of_choice = fields
    if choice is not None:
        named = [one["function"]["name"] for one in tools]
        if not named or (choice and choice not in named):
            raise RequestRefused(f"{of_choice} must name a tool of the request ({', '.join(named)})")
        return Form(call=choice, tools=tools)
    if schema is None:
        return None
    if not isinstance(schema, Mapping):
        raise RequestRefused(f"{of_schema} must have a JSON Schema")
    check_depth(schema, of_schema)
    return Form(schema=schema, tools=tools)


CHANGES_SAMPLING = "the policy would be sampled in a way that the training does not know of"


def text_of(content: Any, kinds: Sequence[str] = ("text",)) -> str:
    """Return content, a text or a list of parts, as one text. Raises RequestRefused for other parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, Mapping) or part.get("type") not in kinds:
            found = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RequestRefused(f"content must be text, got a part of type {found!r}")
        texts.append(str(part.get("text", "")))
    return "".join(texts)


def content_of(content: Any, kinds: Sequence[str] = ("text",)) -> str | list[dict[str, Any]]:
    """Return content as one text, or as parts for a chat template if it has pictures.

    Raises RequestRefused for other parts, and for a picture whose file is not in the request.
    """
    parts: list[dict[str, Any]] = []
    for part in content if isinstance(content, list) else [content]:
        if isinstance(part, Mapping) and part.get("type") in PICTURES:
            parts.append({"type": "image", "image": picture_of(part)})
        elif parts and parts[-1]["type"] == "text":
            parts[-1]["text"] += text_of([part], kinds)
        else:
            parts.append({"type": "text", "text": text_of([part] if part is not None else None, kinds)})
    if any(part["type"] == "image" for part in parts):
        return parts
    return parts[0]["text"] if parts else ""


def tool_of(name: Any, description: Any, parameters: Any) -> dict[str, Any]:
    """Return a tool as OpenAI's chat API has it."""
    if not isinstance(name, str) or not name:
        raise RequestRefused(f"a tool must have a name, got {name!r}")
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    check_depth(parameters, f"the parameters of the tool {name[:MAX_NAME]!r}")
    function["parameters"] = parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def checked(messages: list[Message]) -> list[Message]:
    """Return messages of a request. Raises RequestRefused without one."""
    if not messages:
        raise RequestRefused("a request must have at least one message, got none")
    return messages


def texts(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return stop texts; without empty ones, which would end every answer."""
    found = (stop,) if isinstance(stop, str) else tuple(stop or ())
    return tuple(text for text in found if text)


def arguments_of(value: Any) -> str:
    """Return arguments of a call as the text that the wire has."""
    return value if isinstance(value, str) else json.dumps(value or {}, ensure_ascii=False)
