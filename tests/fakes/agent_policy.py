# SPDX-License-Identifier: Apache-2.0
"""A policy for sessions: one token a byte, and an engine that writes what the test says, or any bytes."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from recipe.async_pipeline.core.groups.items import spans_of
from recipe.async_pipeline.errors import RequestRefused
from recipe.async_pipeline.gateway.chains import Completion
from recipe.async_pipeline.gateway.conversation import Message, Said, SentPicture, tool_call
from recipe.async_pipeline.gateway.sessions import SessionLimits
from recipe.async_pipeline.gateway.turns import CannotAppend, Form

END = 257
LIMITS = SessionLimits(prompt_tokens=10_000, response_tokens=100_000)
CALL = re.compile(r"\[(\w+) (\{[^{}]*\}|[^\]]*)\]")
"""How the policy writes a tool call: [name {"x": 1}]."""


def rendered(message: Mapping[str, Any]) -> bytes:
    calls = "".join(
        f"[{one['function']['name']} {json.dumps(one['function']['arguments'])}]"
        for one in message.get("tool_calls") or ()
    )
    return f"<{message['role']}>{message['content']}{calls}".encode()


class FakePolicy:
    """Answers with texts in order, then with bytes that follow from the prompt."""

    vocabulary = END + 1

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)
        self.version = 0
        self.prompts: list[list[int]] = []
        self.limits: list[int] = []
        self.stops: list[Sequence[str]] = []
        self.forms: list[Form | None] = []
        self.request_ids: list[str] = []
        self.pictures: list[list[bytes]] = []
        self.tools: list[Any] = []
        self.appends = True
        """Whether messages can be appended."""
        self.gate = asyncio.Event()
        """Answers wait for it."""
        self.gate.set()
        self.error: Exception | None = None

    async def begin(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        if any(message["content"] == "refuse" for message in messages):
            raise RequestRefused("the chat template refuses")
        self.tools.append(list(tools))
        head = json.dumps(tools, sort_keys=True).encode() if tools else b""
        return [*head, *b"".join(map(rendered, messages))]

    async def encode(self, text: str) -> list[int]:
        return [*text.encode()]

    async def append(
        self,
        previous: Sequence[Message],
        new: Sequence[Message],
        token_ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]],
    ) -> tuple[list[int], int]:
        if not self.appends:
            raise CannotAppend("reasoning is stripped")
        closed = [*token_ids] if token_ids[-1] == END else [*token_ids, END]
        return [*closed, *b"".join(map(rendered, new))], len(token_ids)

    async def generate(
        self,
        request_id: str,
        token_ids: Sequence[int],
        max_tokens: int,
        stop: Sequence[str],
        form: Form | None = None,
        pictures: Sequence[SentPicture] = (),
    ) -> Completion:
        self.forms.append(form)
        self.pictures.append([picture.data for picture in pictures])
        self.prompts.append(list(token_ids))
        self.limits.append(max_tokens)
        self.stops.append(stop)
        self.request_ids.append(request_id)
        before, number = self.version, len(self.prompts)
        text = self.answers.pop(0) if self.answers else None
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        seed = hashlib.blake2b(json.dumps(list(token_ids)).encode(), digest_size=6).digest()
        written = list(seed if text is None else text.encode())
        tokens = [*written, END][:max_tokens]
        spans = [(before, 0)]
        if self.version != before and len(tokens) > 1:
            spans.append((self.version, len(tokens) // 2))
        return Completion(
            tokens, [-number - i / 64 for i in range(len(tokens))], spans_of(spans), tokens[-1] == END
        )

    async def read(
        self, token_ids: Sequence[int], tools: Sequence[Mapping[str, Any]], stop: Sequence[str]
    ) -> Said:
        text = bytes(token for token in token_ids if token < 256).decode(errors="replace")
        calls = [tool_call(name, given) for name, given in CALL.findall(text)] if tools else []
        text = CALL.sub("", text) if tools else text
        for one in stop:
            if one in text:
                return Said(text[: text.index(one)], tuple(calls), one)
        return Said(text, tuple(calls))
