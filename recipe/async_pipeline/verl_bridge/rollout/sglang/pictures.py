# SPDX-License-Identifier: Apache-2.0
"""SGLang's multimodal processor with the tokens of a request as they were given.

SGLang decodes the tokens of a request with pictures and encodes the text again, which gives other tokens
where the policy has not written what the tokenizer would. Only the pictures are left to it here.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any


def keep_tokens(processor: Any) -> None:
    """Have `TokenizerManager.mm_processor` take the tokens that it is given, with their placeholders.

    A request then raises ValueError if its pictures take other numbers of tokens than its placeholders, or
    if the processor of its model changes its tokens in another way.
    """
    load, combine = processor.load_mm_data, processor.process_and_combine_mm_data
    process = processor.process_mm_data_async

    def load_mm_data(*, prompt: Any, multimodal_tokens: Any, image_data: Any = None, **others: Any) -> Any:
        given = prompt if isinstance(prompt, list) else None
        if given is not None and image_data and not others.get("video_data") and not others.get("audio_data"):
            prompt = multimodal_tokens.image_token * len(image_data)
        loaded = load(prompt=prompt, multimodal_tokens=multimodal_tokens, image_data=image_data, **others)
        loaded.given_tokens = given
        return loaded

    def process_and_combine_mm_data(base_output: Any, mm_tokens: Any, **others: Any) -> Any:
        items, tokens, result = combine(base_output, mm_tokens, **others)
        given = getattr(base_output, "given_tokens", None)
        if given is not None:
            tokens = tokens.new_tensor(given)
            _move(items, tokens, mm_tokens, processor)
        return items, tokens, result

    async def process_mm_data_async(*args: Any, **named: Any) -> Any:
        made = await process(*args, **named)
        given = next(filter(_are_tokens, (*args, *named.values())), None)
        if given is not None and made is not None and made.input_ids != given:
            name = type(processor).__name__
            raise ValueError(f"{name} of SGLang changes the tokens of a request with pictures; use vllm")
        return made

    if not inspect.iscoroutinefunction(load):
        # Since 0.5.18 it is one, and SGLang keeps tokens by itself.
        processor.load_mm_data = load_mm_data
        processor.process_and_combine_mm_data = process_and_combine_mm_data
    processor.process_mm_data_async = process_mm_data_async


def placeholders(processor: Any) -> Mapping[str, float]:
    """Return a bias of the logits with which no placeholder is written, as verl's vLLM does it.

    The trainer could not tell a placeholder that the policy wrote from one of a picture.
    """
    tokens = processor.mm_tokens
    ids = (tokens.image_token_id, tokens.video_token_id, tokens.audio_token_id)
    return {str(one): float("-inf") for one in ids if one is not None}


def _are_tokens(value: Any) -> bool:
    """Return whether an argument is the tokens of a request; no other one is a list of numbers."""
    return isinstance(value, list) and isinstance(next(iter(value), None), int)


def _move(items: Iterable[Any], tokens: Any, mm_tokens: Any, processor: Any) -> None:
    """Set the offsets of all items to the placeholders of `tokens`, whose order is the one of the items."""
    by_kind = defaultdict(list)
    for item in items:
        by_kind[item.modality].append(item)
    for kind, of_kind in by_kind.items():
        found = processor.get_mm_items_offset(tokens, mm_tokens.get_token_id_by_modality(kind))
        made, given = _lengths([at for item in of_kind for at in item.offsets]), _lengths(found)
        if made != given:
            raise ValueError(
                f"SGLang makes {made} tokens of the pictures of a request, whose placeholders are {given}: "
                "is the same processor used?"
            )
        places = iter(found)
        for item in of_kind:
            item.offsets = list(islice(places, len(item.offsets)))


def _lengths(offsets: Sequence[tuple[int, int]]) -> list[int]:
    return [end - start + 1 for start, end in offsets]
