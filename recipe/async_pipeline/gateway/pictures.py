# SPDX-License-Identifier: Apache-2.0
"""Pictures in messages of agents: files inside a request, which chat templates get as parts of content."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import RequestRefused

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
