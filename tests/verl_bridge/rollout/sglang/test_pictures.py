# SPDX-License-Identifier: Apache-2.0
"""SGLang's multimodal processor, which expands each picture to four placeholders."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recipe.async_pipeline.verl_bridge.rollout.sglang.pictures import keep_tokens, placeholders

START, PICTURE, END = 7, 8, 9
OF_TEXT = [1, 2, 3]
"""What the tokenizer makes of any text."""
SEEN = [START, *[PICTURE] * 4, END]


class Processor:
    """SGLang's: `load_mm_data` makes a text, `process_and_combine_mm_data` tokens and items of it."""

    mm_tokens = SimpleNamespace(
        image_token="<picture>",
        image_token_id=PICTURE,
        video_token_id=None,
        audio_token_id=11,
        get_token_id_by_modality=lambda kind: {"image": PICTURE}[kind],
    )

    def load_mm_data(self, *, prompt: Any, multimodal_tokens: Any, image_data: Any, **others: Any) -> Any:
        text = "<picture>".join(["decoded"] * (len(image_data) + 1)) if isinstance(prompt, list) else prompt
        return SimpleNamespace(input_text=text)

    def process_and_combine_mm_data(self, base_output: Any, mm_tokens: Any) -> Any:
        parts = base_output.input_text.split("<picture>")
        tokens = OF_TEXT if parts[0] else []
        for part in parts[1:]:
            tokens = [*tokens, *SEEN, *(OF_TEXT if part else [])]
        encoded = torch.tensor(tokens)
        offsets = self.get_mm_items_offset(encoded, PICTURE)
        return [SimpleNamespace(modality="image", offsets=[at]) for at in offsets], encoded, {}

    @staticmethod
    def get_mm_items_offset(tokens: torch.Tensor, placeholder: int) -> list[tuple[int, int]]:
        places = [at for at, token in enumerate(tokens.tolist()) if token == placeholder]
        starts = [at for at in places if at - 1 not in places]
        return [(at, next(end for end in places if end >= at and end + 1 not in places)) for at in starts]

    async def process_mm_data_async(self, image_data: Any, audio_data: Any, input_text: Any) -> Any:
        loaded = self.load_mm_data(
            prompt=input_text, multimodal_tokens=self.mm_tokens, image_data=image_data, audio_data=audio_data
        )
        items, tokens, _ = self.process_and_combine_mm_data(loaded, self.mm_tokens)
        return SimpleNamespace(
            input_ids=tokens.tolist(), offsets=[at for item in items for at in item.offsets]
        )


class OfAnotherKind(Processor):
    """One that does not use what all of SGLang's share."""

    async def process_mm_data_async(self, image_data: Any, audio_data: Any, input_text: Any) -> Any:
        return SimpleNamespace(input_ids=OF_TEXT)


def processed(processor: Any, prompt: list[int] | str, pictures: int) -> Any:
    keep_tokens(processor)
    return asyncio.run(
        processor.process_mm_data_async(image_data=["p"] * pictures, audio_data=None, input_text=prompt)
    )


def test_given_tokens_are_read_as_they_are_with_their_pictures_in_place() -> None:
    prompt = [5, *SEEN, 6, 6, 6, *SEEN, 5]
    made = processed(Processor(), prompt, 2)
    assert (made.input_ids, made.offsets) == (prompt, [(2, 5), (11, 14)])


def test_a_text_is_encoded() -> None:
    assert processed(Processor(), "a<picture>b", 1).input_ids == [*OF_TEXT, *SEEN, *OF_TEXT]


@pytest.mark.parametrize("prompt", [[5, START, PICTURE, END], [5, *SEEN, PICTURE]])
def test_placeholders_that_are_not_the_ones_of_the_pictures_are_refused(prompt: list[int]) -> None:
    with pytest.raises(ValueError, match=r"SGLang makes \[4\] tokens of the pictures of a request, whose"):
        processed(Processor(), prompt, 1)


def test_a_processor_that_changes_tokens_in_another_way_is_named() -> None:
    with pytest.raises(ValueError, match="OfAnotherKind of SGLang changes the tokens of a request"):
        processed(OfAnotherKind(), [5, *SEEN], 1)


def test_a_release_that_keeps_tokens_by_itself_is_left_alone() -> None:
    class Newer(Processor):
        async def load_mm_data(self, **given: Any) -> Any:  # type: ignore[override]
            return given["prompt"]

        async def process_mm_data_async(self, image_data: Any, audio_data: Any, input_text: Any) -> Any:
            return SimpleNamespace(input_ids=await self.load_mm_data(prompt=input_text))

    assert processed(Newer(), [5, *SEEN], 1).input_ids == [5, *SEEN]


def test_no_placeholder_is_written() -> None:
    assert placeholders(Processor()) == {"8": float("-inf"), "11": float("-inf")}
