# SPDX-License-Identifier: Apache-2.0
"""OpenAI's completions: a text, or tokens, that the policy continues without a chat template."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from ..turns import Ask, Reply
from ..wire import (
    CHANGES_SAMPLING,
    CONSTRAINTS,
    KEPT,
    OF_ENGINES,
    Parameters,
    Read,
    Stateless,
    decoded,
    event,
    ignored,
    now,
    refuse,
    texts,
)
from .openai_chat import NEUTRAL, SAMPLING, OpenAIChat, usage_of

PARAMETERS = Parameters(
    honoured=("prompt", "model", "stream", "stream_options", "max_tokens", "stop"),
    checked=("n", "best_of", "echo", "suffix", "logprobs", "logit_bias"),
    refused=("response_format", *KEPT, *CONSTRAINTS),
    neutral=NEUTRAL,
    counted=(*SAMPLING, *OF_ENGINES),
)


class _Body(Stateless):
    prompt: str | list[str | int]
    model: str = "policy"
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: int | None = None
    logit_bias: dict[str, float] | None = None


class OpenAICompletions(OpenAIChat):
    """`POST /v1/completions`."""

    path = "/v1/completions"
    parameters = PARAMETERS

    def read(self, body: bytes) -> Read:
        found = decoded(body, _Body)
        prompt: Any = found.prompt
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
            prompt = prompt[0]
        refuse(
            {
                "prompt": isinstance(prompt, list) and any(isinstance(part, str) for part in prompt),
                "n": found.n not in (None, 1),
                "best_of": found.best_of not in (None, 1),
            },
            "a request has one answer; send several",
        )
        refuse({"logit_bias": bool(found.logit_bias)}, CHANGES_SAMPLING)
        refuse(
            {"echo": bool(found.echo), "suffix": bool(found.suffix)}, "the policy only continues the prompt"
        )
        refuse(
            {"logprobs": found.logprobs is not None}, "/v1/generate returns log-probs and versions of tokens"
        )
        given = ignored(body, PARAMETERS)
        ask = Ask([], [], found.max_tokens, texts(found.stop), given, prompt=prompt)
        usage = bool((found.stream_options or {}).get("include_usage"))
        return Read(ask, found.model, bool(found.stream), usage)

    def answer(self, read: Read, reply: Reply) -> bytes:
        body = {**_head(read, reply), "choices": [_choice(reply)], "usage": usage_of(reply)}
        return msgspec.json.encode(body)

    def events(self, read: Read, reply: Reply) -> Iterator[bytes]:
        head = _head(read, reply)
        yield event({**head, "choices": [_choice(reply)]})
        if read.usage:
            yield event({**head, "choices": [], "usage": usage_of(reply)})
        yield b"data: [DONE]\n\n"


def _choice(reply: Reply) -> dict[str, Any]:
    return {"index": 0, "text": reply.said.text, "logprobs": None, "finish_reason": reply.finish}


def _head(read: Read, reply: Reply) -> dict[str, Any]:
    return {"id": f"cmpl-{reply.id}", "object": "text_completion", "created": now(), "model": read.model}
