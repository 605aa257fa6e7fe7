# SPDX-License-Identifier: Apache-2.0
"""Prepare the tokens of agent loops once for all responses to a prompt.

For each response verl creates the builder that renders chat templates, and uses it in threads: for the
prompt, which is the same for all responses of a group, and to append the tokens of a turn, which takes less
time than to wake the thread. Agent loops that override the methods of verl's base class keep their own.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

from cachetools import LRUCache

SHORT_BYTES = 4096
"""Messages up to this size are tokenized on the event loop, in less time than a thread takes to start."""
PROMPTS = 1024
"""Number of prompts whose tokens are remembered."""
BUILDERS = 16
"""Number of builders that are remembered: one for each configuration of an agent loop."""


def created_once(create: Callable[..., Any]) -> Callable[..., Any]:
    """Return `create`, which makes a builder, but with one result for each set of arguments.

    Builders hold no state of a response. Arguments are compared by identity, except that empty ones are
    equal; the cache keeps them, so that no other object gets their identity.
    """
    made: LRUCache[tuple[Any, ...], tuple[Any, dict[str, Any]]] = LRUCache(BUILDERS)

    def once(tokenizer: Any, **arguments: Any) -> Any:
        given = {name: value for name, value in arguments.items() if value is not None and value != {}}
        key = (id(tokenizer), *sorted((name, id(value)) for name, value in given.items()))
        known = made.get(key)
        if known is None:
            known = made[key] = (create(tokenizer, **arguments), {"": tokenizer, **given})
        return known[0]

    return once


def tokenized_once(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return verl's `ct_build_initial_tokens`, but tokenize equal messages once.

    Prompts of a model with a processor are left to verl.
    """
    known: LRUCache[tuple[int, bytes], tuple[Any, list[int]]] = LRUCache(PROMPTS)

    async def ct_build_initial_tokens(
        loop: Any, messages: list[dict[str, Any]], tools: Any = None, **media: Any
    ) -> list[int]:
        builder, described = loop.continuous_token_builder, _described(messages, tools)
        if loop.processor is not None or described is None:
            tokens: list[int] = await stock(loop, messages, tools=tools, **media)
            return tokens

        key = (id(builder), described)
        if key not in known:
            render = partial(builder.build_initial_tokens, messages, tools=tools, **media)
            short = len(described) <= SHORT_BYTES
            rendered = render() if short else await loop.loop.run_in_executor(None, render)
            known[key] = (builder, rendered)
            return list(loop._cap_text_prompt_length(rendered))
        return list(loop._cap_text_prompt_length(known[key][1]))

    return ct_build_initial_tokens


def _described(messages: Any, tools: Any) -> bytes | None:
    """Return bytes that differ if the messages or the tools differ, or None if there are none."""
    try:
        return pickle.dumps((messages, tools), protocol=5)
    except Exception:  # noqa: BLE001  any object may be in a message, and fail with any error
        return None


async def merge_assistant_token(
    loop: Any,
    runtime_token_ids: list[int],
    assistant_token_ids: list[int],
    response_mask: list[int],
    response_logprobs: list[float] | None = None,
    assistant_logprobs: list[float] | None = None,
) -> tuple[Any, Any, Any]:
    """Do what verl's `ct_merge_assistant_token` does, on the event loop."""
    builder = loop.continuous_token_builder
    merged = builder.merge_assistant_tokens(runtime_token_ids, assistant_token_ids)
    mask, logprobs = builder.align_response_metadata(
        merged, response_mask, response_logprobs, assistant_logprobs=assistant_logprobs
    )
    return merged, mask, logprobs
