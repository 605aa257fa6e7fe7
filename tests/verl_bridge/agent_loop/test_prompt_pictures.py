# SPDX-License-Identifier: Apache-2.0
"""A picture travels as the file that it was, and is the same when it is opened."""

from __future__ import annotations

import io
import pickle
from typing import Any

import pytest
from PIL import Image

from recipe.async_pipeline.verl_bridge.agent_loop.prompt_pictures import (
    OF_PNG,
    closed,
    has_media,
    opened,
)

pytestmark = pytest.mark.real_engine


def file_of(side: int = 64, keep: float = 1.0) -> bytes:
    """Return the first part of a picture's file."""
    written = io.BytesIO()
    Image.effect_noise((side, side), 50).convert("RGB").save(written, "PNG")
    return written.getvalue()[: int(len(written.getvalue()) * keep)]


def asked(*pictures: dict[str, Any]) -> list[dict[str, Any]]:
    """Return messages as verl's data set makes them."""
    parts = [{"type": "image", **one} for one in pictures]
    return [
        {"role": "system", "content": "look"},
        {"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]},
    ]


def row_of(*pictures: dict[str, Any]) -> dict[str, Any]:
    messages = asked(*pictures)
    return {"prompt": messages, "raw_prompt": messages, "index": 3}


def from_file(data: bytes, **more: Any) -> dict[str, Any]:
    return {"bytes": data, "path": None, **more, "image": Image.open(io.BytesIO(data))}


async def test_a_picture_with_a_file_travels_as_its_file() -> None:
    data = file_of()
    row = row_of(from_file(data, min_pixels=784))
    travels = closed(row, decode=False)
    assert travels == row_of({"bytes": data, "path": None, "min_pixels": 784})
    assert len(pickle.dumps(travels)) < len(data) + 500, "also the column in which verl has it twice"
    assert "image" in row["prompt"][1]["content"][0], "what the data set gave is not changed"
    back = await opened(pickle.loads(pickle.dumps(travels)))
    assert back == row, "pixel by pixel"
    assert [*back["prompt"][1]["content"][0]] == ["type", "bytes", "path", "min_pixels", "image"]


@pytest.mark.parametrize("mode", OF_PNG)
async def test_a_picture_without_a_file_travels_as_a_file_that_keeps_its_pixels(mode: str) -> None:
    drawn = Image.effect_noise((64, 48), 50).convert(mode)
    row = row_of({"image": drawn})
    travels = closed(row, decode=False)
    (part,) = (one for one in travels["raw_prompt"][1]["content"] if one["type"] == "image")
    assert "image" not in part and part["bytes"].startswith(b"\x89PNG")
    back = (await opened(pickle.loads(pickle.dumps(travels))))["prompt"][1]["content"][0]["image"]
    assert (back.mode, back.size, back.tobytes()) == (mode, (64, 48), drawn.tobytes())
    assert back.getpalette() == drawn.getpalette()


async def test_what_no_file_keeps_stays_as_it_is() -> None:
    drawn = Image.new("CMYK", (4, 4), "red")
    named = {"image": "https://example.org/a.png"}
    rows = [row_of(one) for one in ({"image": drawn}, named, {"bytes": None, "path": "a.png"})]
    for row in [*rows, row_of(), {"raw_prompt": "a text"}, {"index": 3}]:
        assert closed(row, decode=True) == await opened(row) == row


async def test_a_file_that_is_cut_off_shows_when_it_is_decoded() -> None:
    broken = row_of(from_file(file_of(keep=0.5)))
    travels = closed(broken, decode=False)
    with pytest.raises(OSError, match="truncated"):
        await opened(travels)
    with pytest.raises(OSError, match="truncated"):
        closed(broken, decode=True)
    without_file = row_of({"image": Image.open(io.BytesIO(file_of(keep=0.5)))})
    with pytest.raises(OSError, match="truncated"):
        closed(without_file, decode=False)


def test_only_text_is_no_media() -> None:
    assert not has_media([{"role": "user", "content": "<image>"}, {"role": "assistant", "content": None}])
    assert not has_media(asked()) and not has_media("a prompt of a data set of a user")
    assert has_media(asked(from_file(file_of()))) and has_media([{"content": [{"type": "video"}]}])
