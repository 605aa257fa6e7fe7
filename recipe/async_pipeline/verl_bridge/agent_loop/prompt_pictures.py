# SPDX-License-Identifier: Apache-2.0
"""Pictures of prompts: closed, as the files that they were, until an agent loop worker opens them.

verl's data set opens the file of a picture. It travels and waits closed, because pixels take several times
its memory, and is decoded in the worker that generates for its prompt.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from PIL import Image
from verl.utils.tokenizer.tokenizer import get_processor_token_id

from ...errors import ConfigError

PromptRow = Mapping[str, Any]

STORED = "__stored__"
"""In the payload of a prompt with pictures: Ray's reference to its row."""
OF_PNG = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
"""Modes of pictures that PNG keeps as they are. Data sets of Hugging Face have pictures without a file."""


def has_media(messages: Any) -> bool:
    """Return whether a prompt has anything but text."""
    return any(part.get("type", "text") != "text" for part in _parts(messages))


def media_tokens(processor: Any) -> dict[str, int]:
    """Return the token that stands for a part of a picture or video, by verl's name of these media; none for
    a model whose positions do not depend on them. `processor`: verl's, or None.
    """
    if not hasattr(processor, "get_rope_index"):
        return {}
    found = {f"{name}s": get_processor_token_id(processor, name) for name in ("image", "video")}
    return {name: token for name, token in found.items() if token is not None}


def misplaced(media: Mapping[str, int], tokens: Sequence[int], shown: Mapping[str, int]) -> list[str]:
    """Return how the runs of tokens that stand for a picture or video differ from what is `shown`.

    Text may contain such tokens, of a row, an agent, a tool or the policy itself; verl, the engine and the
    trained model would fail on one without a picture. `media`: of `media_tokens`.
    """
    found = []
    for name, token in media.items():
        places = sum(one == token and one != before for before, one in pairwise([None, *tokens]))
        if places != (there := shown.get(name, 0)):
            found.append(f"has {places} places for {name}, of which there are {there}")
    return found


def require_vision(loop: Any) -> None:
    """Raise ConfigError unless an agent loop's model reads pictures."""
    if loop.processor is None or not loop.continuous_token_builder.supports_multimodal():
        raise ConfigError("an episode shows pictures, but actor_rollout_ref.model.path reads text only")


def closed(row: PromptRow, *, decode: bool) -> dict[str, Any]:
    """Return a row whose pictures are closed if they have a file, and decoded otherwise.

    `decode`: decode all of them once. Raises what Pillow raises for a picture that it cannot decode.
    """
    for part in _parts(row.get("raw_prompt")):
        if isinstance(part.get("image"), Image.Image) and (decode or not part.get("bytes")):
            part["image"].load()
    return _changed(row, _close)


async def opened(row: PromptRow) -> dict[str, Any]:
    """Return a row as verl's data set makes it, but with pictures that a thread has decoded.

    Raises as `closed`.
    """
    return await asyncio.to_thread(_changed, row, _open) if has_media(row.get("raw_prompt")) else dict(row)


def _close(part: dict[str, Any]) -> dict[str, Any]:
    picture = part.get("image")
    if isinstance(picture, Image.Image):
        if not part.get("bytes") and picture.mode in OF_PNG:
            file = io.BytesIO()
            picture.save(file, "PNG", compress_level=1)
            part["bytes"] = file.getvalue()
        if part.get("bytes"):
            del part["image"]
    return part


def _open(part: dict[str, Any]) -> dict[str, Any]:
    if part.get("type") == "image" and part.get("bytes") and "image" not in part:
        part["image"] = decoded(part["bytes"])
    return part


def decoded(file: bytes) -> Image.Image:
    """Return the picture of a file. Raises what Pillow raises if it cannot decode it."""
    picture = Image.open(io.BytesIO(file))
    picture.load()
    return picture


def _changed(row: PromptRow, change: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    messages: Any = row.get("raw_prompt")
    if not has_media(messages):
        return dict(row)
    made = [
        {**one, "content": [change(dict(part)) for part in one["content"]]}
        if isinstance(one.get("content"), list)
        else one
        for one in messages
    ]
    # verl's column of prompts is the same list.
    return {name: made if value is messages else value for name, value in row.items()}


def _parts(messages: Any) -> Iterator[Mapping[str, Any]]:
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list):
            yield from content
