# SPDX-License-Identifier: Apache-2.0
"""Messages of a conversation, when two of them are the same, and how two conversations differ.

A message is a mapping as chat templates read it: `role`, `content` (a text, or parts with pictures), for a
message of the assistant also `tool_calls`, for one of a tool `tool_call_id`. Agents do not send back exactly
what they received: they drop ids, reasoning and white space, and write arguments again. What a chat template
would not show, or the policy did not mean, makes no difference here.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import itertools
import json
import secrets
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ..errors import RequestRefused

Message = dict[str, Any]
MAX_DEPTH = 100
"""Of values in a request that agents choose freely: schemas of tools and arguments of calls."""
RowReason = Literal["system_prompt", "tools", "reminder", "history", "branch", "template", "others"]
"""Why a request begins a chain although the session has one; `agents.episodes.COUNTS` says them in words."""
END_OF_REASONING = "</think>"
"""What precedes it in a message of the assistant is reasoning, which many agents leave out of the history."""


class ToolCall(NamedTuple):
    """A call that the policy wrote."""

    id: str
    name: str
    arguments: str
    """JSON, as far as the policy wrote valid JSON."""

    def as_message(self) -> dict[str, Any]:
        """Return it as an item of `tool_calls`."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": parsed(self.arguments)},
        }


class Said(NamedTuple):
    """A turn of the policy as text."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    stop: str | None = None
    """The stop text of the request that ended it, if one did."""
    reasoning: str = ""
    """What it wrote before its answer, as far as its family marks that."""

    def as_message(self) -> Message:
        """Return it as a message of the assistant."""
        message: Message = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [call.as_message() for call in self.calls]
        return message


def tool_call(name: str, arguments: str) -> ToolCall:
    """Return a call with a new id."""
    found = parsed(arguments)
    if isinstance(found, dict) and "\\u" in arguments:
        # Its escapes may name half a character, which agents could not send back.
        arguments = json.dumps(found, ensure_ascii=False)
    return ToolCall("call_" + secrets.token_hex(12), encodable(name), encodable(arguments))


def parsed(arguments: Any) -> Any:
    """Return the arguments of a call as a mapping, which chat templates expect; as they are if invalid.

    Raises RequestRefused for values, as opposed to text, that are nested too deep.
    """
    if not isinstance(arguments, str):
        check_depth(arguments, "arguments of a call")
        return arguments
    try:
        found = json.loads(arguments)
        check_depth(found, "arguments of a call")
        found = encodable(found)
    except (ValueError, RecursionError, RequestRefused):
        return arguments
    return found if isinstance(found, dict) else arguments


def check_depth(value: Any, what: str) -> None:
    """Raises RequestRefused if a value of JSON is nested deeper than MAX_DEPTH.

    Chat templates and the comparison of histories are recursive.
    """
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH + 1):
        inner = (
            one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)
        )
        level = [one for values in inner for one in values]
        if not level:
            return
    raise RequestRefused(f"{what} must be nested at most {MAX_DEPTH} deep; flatten them")


def encodable(value: Any) -> Any:
    """Return a value of JSON without lone surrogates: JSON can name them, but UTF-8 cannot encode them."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {encodable(name): encodable(one) for name, one in value.items()}
    return [encodable(one) for one in value] if isinstance(value, list) else value


def identity(message: Mapping[str, Any]) -> Hashable:
    """Return a value that is equal for messages that are the same."""
    role, content = message["role"], message.get("content") or ""
    if isinstance(content, list):
        return role, tuple(part.get("text", part.get("image")) for part in content)
    if role != "assistant":
        return role, content
    text = str(content).rpartition(END_OF_REASONING)[2].strip()
    return role, text, tuple(_call(one) for one in message.get("tool_calls") or ())


def identities(messages: Sequence[Mapping[str, Any]]) -> list[Hashable]:
    """Return the identity of each message."""
    return [identity(message) for message in messages]


def _call(call: Mapping[str, Any]) -> tuple[str, str]:
    function = call["function"]
    arguments = parsed(function.get("arguments") or {})
    return str(function["name"]), json.dumps(arguments, sort_keys=True, ensure_ascii=False)


def hashable(value: Any) -> Hashable:
    """Return plain values as tuples, which compare as they do."""
    if isinstance(value, Mapping):
        return tuple((name, hashable(one)) for name, one in sorted(value.items()))
    return tuple(map(hashable, value)) if isinstance(value, list | tuple) else value


def difference(known: list[Hashable], wanted: list[Hashable], *, same_tools: bool) -> RowReason:
    """Return how a request differs from the messages of a chain."""
    at = shared(known, wanted)
    if at == len(known) or at == len(wanted):
        return "branch" if same_tools else "tools"
    if "system" in (_role(known[at]), _role(wanted[at])):
        rest = [[one for one in found if _role(one) != "system"] for found in (known, wanted)]
        if shared(*rest):
            return "system_prompt"
    if at == 0 and not any(one in known and _role(one) != "system" for one in wanted):
        return "others"
    if not same_tools:
        return "tools"
    if _role(known[at]) in ("user", "tool") and known[at + 1 : at + 2] == wanted[at + 1 : at + 2]:
        return "reminder"
    if at and _role(known[at - 1]) == "assistant":
        return "branch"
    return "history"


def shared(one: Sequence[Hashable], other: Sequence[Hashable]) -> int:
    """Return how many messages two conversations have in common from their beginning."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _role(message: Hashable) -> Hashable:
    return message[0] if isinstance(message, tuple) else None


PICTURES = ("image_url", "input_image", "image")
"""Types of parts with a picture: of OpenAI's chat and responses, and of Anthropic's messages."""
INSIDE = "a picture must be inside the request, as data:image/png;base64,... or a source of type base64"


@dataclass(frozen=True)
class SentPicture:
    """The file of a picture. Equal files are the same picture."""

    data: bytes = field(repr=False, compare=False)
    digest: bytes = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", hashlib.blake2b(self.data, digest_size=16).digest())


def picture_of(part: Mapping[str, Any]) -> SentPicture:
    """Return the picture of a part in any dialect. Raises RequestRefused if its file is elsewhere."""
    found = part.get("source") if part["type"] == "image" else part.get("image_url")
    if isinstance(found, Mapping):
        text = found.get("data") if found.get("type") == "base64" else found.get("url")
    else:
        text = found
    if not isinstance(text, str):
        raise RequestRefused(f"{INSIDE}, got {type(text).__name__}")
    if part["type"] != "image":
        head, comma, text = text.partition(",")
        if not (comma and head.startswith("data:image/") and head.endswith(";base64")):
            raise RequestRefused(f"{INSIDE}, got {head[:80]!r}")
    try:
        return SentPicture(base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError) as error:
        raise RequestRefused(f"{INSIDE}; this one is not valid base64: {error}") from error


def pictures_of(messages: Iterable[Mapping[str, Any]]) -> list[SentPicture]:
    """Return the pictures of messages, in their order."""
    return [
        part["image"]
        for message in messages
        if isinstance(message.get("content"), list)
        for part in message["content"]
        if part["type"] == "image"
    ]


def with_pictures(
    messages: Sequence[Mapping[str, Any]], shown: Mapping[SentPicture, Any]
) -> list[dict[str, Any]]:
    """Return messages with something else in place of each picture."""
    return [
        {
            **message,
            "content": [
                {**part, "image": shown[part["image"]]} if part["type"] == "image" else part
                for part in message["content"]
            ],
        }
        if isinstance(message.get("content"), list)
        else dict(message)
        for message in messages
    ]
