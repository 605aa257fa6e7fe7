# SPDX-License-Identifier: Apache-2.0
"""What answers the requests of a session: verl's Continuous Token builders, its tool parsers, the engines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from os.path import commonprefix
from typing import Any, TypeVar

from verl.experimental.agent_loop.tool_parser import GptOssToolParser, ToolParser
from verl.tools.schemas import OpenAIFunctionToolSchema

from ....core.groups.items import spans_of
from ....errors import ConfigError, RequestRefused
from ....gateway.chains import Completion
from ....gateway.conversation import (
    Message,
    Said,
    SentPicture,
    ToolCall,
    pictures_of,
    tool_call,
    with_pictures,
)
from ....gateway.turns import CannotAppend, Form
from ....gateway.wire import arguments_of
from ....weight_sync.engine.versioned_engine import FORM
from ...calls.ray_calls import cause_of
from ...rollout.client import refuses_request
from ..prompt_pictures import decoded, media_tokens, misplaced, require_vision
from ..tokens.prompt_tokens import SHORT_BYTES, tokens_of, turn_ends
from .response_form import THINK, Reasoning, has_think_tags, reasoning_of, structured, type_of

T = TypeVar("T")
Tools = Sequence[Mapping[str, Any]]


class SessionPolicy:
    """The policy of one session; see `gateway.sessions.Policy`."""

    def __init__(self, loop: Any, sampling_params: Mapping[str, Any], tool_parser: str | None) -> None:
        """`loop`: an agent loop with tokenizer and client; `tool_parser`: a name of verl's."""
        self._builder, self._tokenizer = loop.continuous_token_builder, loop.tokenizer
        self._client, self._sampling = loop.server_manager, dict(sampling_params)
        self._loop, self._limit_images = loop, loop.rollout_config.get("limit_images")
        self._shown: dict[SentPicture, Any] = {}
        """Pictures of the session, in the size in which the model sees them."""
        self._media = media_tokens(loop.processor)
        self._format = tool_parser
        self._parser = (
            None if tool_parser is None else ToolParser.get_tool_parser(tool_parser, self._tokenizer)
        )
        if self._parser is not None and self._parser.stop_token_ids:
            known = self._sampling.get("stop_token_ids") or ()
            self._sampling["stop_token_ids"] = [*known, *self._parser.stop_token_ids]
        model = tokens_of(loop.config, self._tokenizer)
        self.vocabulary = model.vocabulary
        """How many tokens the model has."""
        self._ends = turn_ends(model, self._sampling)
        self.generate_s = 0.0
        """Seconds with the engines."""

    async def begin(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """Return the tokens of a whole request. Raises RequestRefused if the chat template refuses it."""
        refused: Exception | None = None
        seen = await self._seen(messages)
        pictures = self.shown(pictures_of(messages)) or None
        for given in (seen, _with_json(seen)):
            render = partial(
                self._builder.build_initial_tokens, given, tools=list(tools) or None, images=pictures
            )
            try:
                tokens: list[int] = await _run(render, messages)
                return list(tokens)
            except Exception as error:  # noqa: BLE001 - a chat template may raise anything
                refused = refused or error
        raise RequestRefused(f"the chat template of the model refuses these messages: {refused}") from refused

    async def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without a chat template."""
        encode = partial(self._tokenizer.encode, text, add_special_tokens=False)
        return list(await _run(encode, [{"content": text}]))

    async def append(
        self, previous: Sequence[Message], new: Sequence[Message], token_ids: Sequence[int], tools: Tools
    ) -> tuple[list[int], int]:
        """Return the tokens with new messages, and how many were kept. Raises CannotAppend."""
        before, closed = await self._seen(previous), list(token_ids)
        new = await self._seen(new)
        try:
            if closed[-1] not in self._ends and closed[-1:] != self._closing[:1]:
                closed += self._closing
            merge = partial(
                self._builder.merge_context_tokens,
                before,
                [*before, *new],
                closed,
                tools=list(tools) or None,
            )
            merged = await _run(merge, new)
        except Exception as error:  # noqa: BLE001 - a chat template may raise anything
            raise CannotAppend(str(error)) from error
        kept = min(len(token_ids), len(closed) - merged.removed_prefix_token_count)
        return list(merged.token_ids), kept

    async def _seen(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages with decoded pictures, for a chat template.

        Raises RequestRefused if the model reads text only, or a picture cannot be decoded.
        """
        pictures = pictures_of(messages)
        if not pictures:
            return list(messages)
        for picture in pictures:
            if picture not in self._shown:
                self._shown[picture] = await self._decoded(picture)
        return with_pictures(messages, self._shown)

    async def _decoded(self, picture: SentPicture) -> Any:
        try:
            require_vision(self._loop)
        except ConfigError as error:
            raise RequestRefused(f"content must be text: {error}") from error
        try:
            part = {"type": "image", "image": await asyncio.to_thread(decoded, picture.data)}
            found = await self._loop.process_multi_modal_info([{"role": "user", "content": [part]}])
        except Exception as error:  # Pillow raises many kinds for a damaged file
            why = f"{type(error).__name__}: {error}"
            raise RequestRefused(f"the picture cannot be shown to the policy: {why}"[:300]) from error
        return found["images"][0]

    def shown(self, pictures: Sequence[SentPicture]) -> list[Any]:
        """Return pictures of the session as the engine and the trainer get them."""
        return [self._shown[picture] for picture in pictures]

    @cached_property
    def _closing(self) -> list[int]:
        """The tokens that the chat template writes after any text of the assistant."""
        asked = [{"role": "user", "content": "q"}]
        turns = [
            self._builder.render_delta_token_id(asked, [{"role": "assistant", "content": text}])
            for text in ("a", "b")
        ]
        reversed_closing: list[int] = commonprefix([turn[::-1] for turn in turns])
        return reversed_closing[::-1]

    @cached_property
    def _reasoning(self) -> Reasoning:
        """How the model writes its reasoning."""
        opens = False
        if has_think_tags(self._tokenizer):
            with suppress(Exception):  # a chat template may refuse it
                asked = self._builder.build_initial_tokens([{"role": "user", "content": "q"}], tools=None)
                opens = self._tokenizer.decode(asked).rstrip().endswith(THINK)
        return reasoning_of(self._tokenizer, opened_by_prompt=opens)

    async def generate(
        self,
        request_id: str,
        token_ids: Sequence[int],
        max_tokens: int,
        stop: Sequence[str],
        form: Form | None = None,
        pictures: Sequence[SentPicture] = (),
    ) -> Completion:
        """Have an engine answer. Raises RequestRefused if it refuses, and what the rollout client raises."""
        if self._limit_images and len(pictures) > self._limit_images:
            raise RequestRefused(
                f"the conversation has {len(pictures)} pictures, and rollout.limit_images is "
                f"{self._limit_images}",
                end="tokens",
            )
        for why in misplaced(self._media, token_ids, {"images": len(pictures)}):
            raise RequestRefused(f"the text of the conversation {why}: it has the model's tokens of them")
        params = {**self._sampling, "max_tokens": max_tokens}
        if form is not None:
            params[FORM] = structured(form, self._format)
        if stop:
            params["stop"] = [*(self._sampling.get("stop") or ()), *stop]
        started = time.perf_counter()
        try:
            output = await self._client.generate(
                request_id=request_id,
                prompt_ids=list(token_ids),
                sampling_params=params,
                image_data=self.shown(pictures) or None,
            )
        except Exception as error:
            if not refuses_request(error):
                raise
            why = str(cause_of(error)).partition("\n")[0]
            raise RequestRefused(f"the engine refuses the request: {why}") from error
        self.generate_s += time.perf_counter() - started
        tokens = list(output.token_ids)
        spans = spans_of(output.extra_fields.get("version_spans") or ())
        whole = bool(tokens) and tokens[-1] in self._ends
        return Completion(tokens, None if output.log_probs is None else list(output.log_probs), spans, whole)

    async def read(self, token_ids: Sequence[int], tools: Tools, stop: Sequence[str]) -> Said:
        """Return an answer as text and tool calls, parsed as verl's own agent loop parses them."""
        reasoning, answer = self._reasoning.split(token_ids)
        text: str = answer.text
        calls: tuple[ToolCall, ...] = ()
        if tools and self._parser is not None:
            content, found = await self._parser.extract_tool_calls(answer.token_ids, _schemas(tools))
            if found:
                if not answer.without_calls:
                    ids = self._tokenizer.encode(content, add_special_tokens=False)
                    text = self._tokenizer.decode(ids, skip_special_tokens=True).strip()
                calls = tuple(tool_call(one.name, one.arguments) for one in found)
        ended_by, at = None, len(text)
        for one in stop:
            if 0 <= (place := text.find(one)) < at:
                ended_by, at = one, place
        return Said(text[:at], calls, ended_by, reasoning)


async def _run(call: Callable[[], T], messages: Sequence[Message]) -> T:
    """Tokenize short messages here, which takes less time than a thread takes to start."""
    contents = [message.get("content") or "" for message in messages]
    if all(isinstance(one, str) for one in contents) and sum(map(len, contents)) <= SHORT_BYTES:
        return call()
    return await asyncio.get_running_loop().run_in_executor(None, call)


def _with_json(messages: Sequence[Message]) -> list[Message]:
    """Return messages whose calls have arguments as JSON text, which DeepSeek's templates concatenate."""
    found = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            function = call["function"]
            text = arguments_of(function.get("arguments"))
            calls.append({**call, "function": {**function, "arguments": text}})
        found.append({**message, "tool_calls": calls} if calls else message)
    return found


def _schemas(tools: Tools) -> list[OpenAIFunctionToolSchema]:
    """Return tools as verl's parsers read them, which use them for the types of arguments only.

    verl's classes know few of the words of JSON Schema, and would refuse a whole tool for one optional
    argument, so a tool is reduced to these types.
    """
    found = []
    for tool in tools:
        function = tool["function"]
        given = function.get("parameters")
        given = given if isinstance(given, Mapping) else {}
        properties, required = given.get("properties"), given.get("required")
        names = properties if isinstance(properties, Mapping) else {}
        reduced = {
            "type": "object",
            "properties": {name: {"type": type_of(one, given)} for name, one in names.items()},
            "required": [one for one in required if one in names] if isinstance(required, list) else [],
        }
        named = {"name": function["name"], "description": "", "parameters": reduced}
        found.append(OpenAIFunctionToolSchema.model_validate({"type": "function", "function": named}))
    return found


RECIPIENT = r"\s+to=functions\.([^\s<]+)"
CALL = (
    # The prompt may end with the beginning. `(?|` numbers the groups of both branches alike.
    r"(?s)(?:<\|start\|>assistant)?"
    rf"(?|{RECIPIENT}\s*<\|channel\|>[^<]*|<\|channel\|>[^<]*{RECIPIENT}[^<]*)"
    r"(?:<\|constrain\|>[^<]*)?<\|message\|>(.*?)<\|call\|>"
)
"""A pattern of the module `regex`, with the name and the arguments as its groups."""


@ToolParser.register("gpt-oss")
class HarmonyToolParser(GptOssToolParser):  # type: ignore[misc]
    """verl's parser with a pattern for all spellings.

    The recipient follows the role or the channel, and the type of the arguments may lack its mark or be
    absent:

        <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>
        <|start|>assistant<|channel|>commentary to=functions.f<|constrain|>json<|message|>{}<|call|>
        <|start|>assistant<|channel|>commentary to=functions.f json<|message|>{}<|call|>
        <|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}<|call|>

    verl's parser reads the first one; of an answer with another one, neither a text nor a call would be left.
    """

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self.tool_call_pattern = CALL
