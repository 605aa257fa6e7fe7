# SPDX-License-Identifier: Apache-2.0
"""The form of an answer as the engines take it, a JSON Schema or a structural tag, and its reasoning."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from ....errors import RequestRefused
from ....gateway.turns import ANY_TOOL, Form


class CallFormat(NamedTuple):
    """How a family of models writes calls of tools."""

    begin: str
    """Before the arguments of a call; NAME is the name of the tool."""
    end: str
    """After the arguments."""
    style: str = "json"
    """XGrammar's name for the form of the arguments."""
    separator: str = "\n"
    """Between two calls."""
    around: tuple[str, str] | None = None
    """Before and after all calls."""
    numbered: str = ""
    """What follows the number of a call, if `begin` has one after it."""


CALLS: Mapping[str, CallFormat] = {
    "hermes": CallFormat('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>"),
    "qwen3_coder": CallFormat("<tool_call>\n<function=NAME>\n", "\n</function>\n</tool_call>", "qwen_xml"),
    "seed": CallFormat("<seed:tool_call>\n<function=NAME>\n", "\n</function>\n</seed:tool_call>", "qwen_xml"),
    "glm": CallFormat("<tool_call>NAME", "</tool_call>", "glm_xml"),
    "minimax": CallFormat(
        *('<invoke name="NAME">\n', "</invoke>\n", "minimax_xml", ""),
        ("<minimax:tool_call>\n", "</minimax:tool_call>"),
    ),
    "deepseek_v4": CallFormat(
        *('<｜DSML｜invoke name="NAME">\n', "</｜DSML｜invoke>\n", "deepseek_xml", ""),
        ("\n\n<｜DSML｜tool_calls>\n", "</｜DSML｜tool_calls>"),
    ),
    "kimi": CallFormat(
        *("<|tool_call_begin|>functions.NAME:", "<|tool_call_end|>", "json", ""),
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        "<|tool_call_argument_begin|>",
    ),
}
"""By the names of verl's parsers. XGrammar has no form for the arguments of gemma4. Calls of gpt-oss end with
a token that ends the answer, too, and engines permit such tokens after the end of a grammar only."""


def structured(form: Form, tool_format: str | None) -> dict[str, str]:
    """Return the only entry of the parameters of structured outputs, `json` or `structural_tag`.

    `tool_format`: the name of verl's parser. Raises RequestRefused if calls of tools are to have a form that
    is unknown for it.
    """
    if form.call is None and not form.tools:
        return {"json": json.dumps(form.schema)}
    if tool_format is None or tool_format not in CALLS:
        field = "a response format with tools" if form.call is None else "tool_choice"
        raise RequestRefused(
            f"{field}: answers have this form with actor_rollout_ref.rollout.multi_turn.format="
            f"{' or '.join(CALLS)} only, got {tool_format}; leave it out"
        )
    calls = _calls(form, CALLS[tool_format])
    answer = {"type": "json_schema", "json_schema": form.schema}
    either = calls if form.call is not None else {"type": "or", "elements": [answer, calls]}
    return {"structural_tag": json.dumps({"type": "structural_tag", "format": either})}


def _calls(form: Form, marks: CallFormat) -> dict[str, Any]:
    """Return the form of one or more calls of the tools that may be called."""
    functions = [one["function"] for one in form.tools]
    tags = [
        {
            "type": "tag",
            "begin": marks.begin.replace("NAME", json.dumps(one["name"], ensure_ascii=False)[1:-1]),
            "content": _arguments(one["parameters"], marks),
            "end": marks.end,
        }
        for one in functions
        if form.call in (None, ANY_TOOL, one["name"])
    ]
    calls = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": marks.separator,
        "at_least_one": True,
        # A tool that is named is called once.
        "stop_after_first": bool(form.call),
    }
    if marks.around is None:
        return calls
    return {"type": "tag", "begin": marks.around[0], "content": calls, "end": marks.around[1]}


def _arguments(schema: Mapping[str, Any], marks: CallFormat) -> dict[str, Any]:
    arguments = {"type": "json_schema", "json_schema": schema}
    if marks.style != "json":
        return {**arguments, "style": marks.style}
    if not marks.numbered:
        return arguments
    number = {"type": "regex", "pattern": "[0-9]+"}
    after = {"type": "const_string", "value": marks.numbered}
    return {"type": "sequence", "elements": [number, after, arguments]}


ANY = "any"
"""The type of an argument about which a schema says nothing; parsers guess it from what the policy writes."""
OF_VALUES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
DEEPEST = 8
"""References and unions that are followed: a schema may refer to itself."""


def type_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> str:
    """Return the first type other than null that a value may have. `root`: holds the `$defs`.

    Optional[int]    {"anyOf": [{"type": "integer"}, {"type": "null"}]}    integer
    a model          {"$ref": "#/$defs/Point"}                             object
    Literal["a"]     {"enum": ["a"]}, {"const": "a"}                       string
    """
    if not isinstance(schema, Mapping) or depth > DEEPEST:
        return ANY
    named = schema.get("type")
    for name in named if isinstance(named, list) else [named]:
        if isinstance(name, str) and name != "null":
            return name
    if "$ref" in schema:
        return type_of(_referred(str(schema["$ref"]), root), root, depth + 1)
    for values in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
        if isinstance(values, list):
            types = (OF_VALUES.get(type(value)) for value in values)
            return next((one for one in types if one is not None), ANY)
    for word in ("anyOf", "oneOf", "allOf"):
        options = schema.get(word)
        found = [type_of(one, root, depth + 1) for one in options] if isinstance(options, list) else []
        known = [one for one in found if one != ANY]
        if known:
            return known[0]
    return ANY


def _referred(name: str, root: Mapping[str, Any]) -> Any:
    found: Any = root
    for part in name.removeprefix("#/").split("/"):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


THINK, END_OF_THINK, CHANNEL = "<think>", "</think>", "<|channel|>"
MESSAGE = re.compile(
    r"(?:<\|start\|>assistant)?(?P<before>[^<]*)<\|channel\|>(?P<header>[^<]*)(?:<\|constrain\|>[^<]*)?"
    r"<\|message\|>(?P<text>.*?)(?:<\|end\|>|<\|return\|>|<\|call\|>|$)",
    re.DOTALL,
)


class Spoken(NamedTuple):
    """What is not reasoning."""

    text: str
    token_ids: list[int]
    """In which tool calls are looked for."""
    without_calls: bool = False
    """The text has no tool calls."""


class Reasoning(Protocol):
    """How a family of models writes its reasoning.

    What of an answer is reasoning, by the family of the model, as servers tell it from the answer.

        tags       Qwen3, DeepSeek   <think> reasoning </think> answer
        channels   gpt-oss           <|channel|>analysis<|message|> reasoning <|end|>
                                     <|start|>assistant<|channel|>final<|message|> answer
        neither                      all is the answer

    The tokenizer tells the family: each has tokens that the others lack.
    """

    def split(self, token_ids: Sequence[int]) -> tuple[str, Spoken]:
        """Return the reasoning and the answer."""


class NoReasoning:
    """A model that does not reason."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def split(self, token_ids: Sequence[int]) -> tuple[str, Spoken]:
        """See `Reasoning`."""
        text = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return "", Spoken(text, list(token_ids))


class Tags:
    """A model that reasons up to `</think>`."""

    def __init__(self, tokenizer: Any, opened_by_prompt: bool) -> None:
        self._tokenizer, self._opened = tokenizer, opened_by_prompt
        self._begin, self._end = tokenizer.convert_tokens_to_ids([THINK, END_OF_THINK])

    def split(self, token_ids: Sequence[int]) -> tuple[str, Spoken]:
        """See `Reasoning`. Without an end, all that was begun is reasoning."""
        ids = list(token_ids)
        if self._end in ids:
            at = len(ids) - ids[::-1].index(self._end)
        elif self._opened or self._begin in ids:
            at = len(ids)
        else:
            return "", Spoken(self._decoded(ids), ids)
        reasoning = self._decoded(ids[:at]).replace(THINK, "").removesuffix(END_OF_THINK).strip()
        return reasoning, Spoken(self._decoded(ids[at:]).lstrip("\n"), ids[at:])

    def _decoded(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text


class Channels:
    """A model that writes messages to channels."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # The prompt ends with it, and verl's parser expects it before each call.
        self._begun: list[int] = tokenizer.encode("<|start|>assistant", add_special_tokens=False)

    def split(self, token_ids: Sequence[int]) -> tuple[str, Spoken]:
        """See `Reasoning`. Text outside of channels is the answer."""
        written = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        reasoning: list[str] = []
        texts: list[str] = []
        for found in MESSAGE.finditer(written):
            if "to=" in found["header"] + found["before"]:
                continue  # a tool call
            (reasoning if found["header"].split()[:1] == ["analysis"] else texts).append(found["text"])
        if not reasoning and not texts and CHANNEL not in written:
            texts = [self._tokenizer.decode(token_ids, skip_special_tokens=True)]
        answer = Spoken("\n".join(texts), [*self._begun, *token_ids], without_calls=True)
        return "\n".join(reasoning), answer


def has_think_tags(tokenizer: Any) -> bool:
    """Return whether a tokenizer has tokens for the beginning and the end of reasoning."""
    known = tokenizer.get_vocab()
    return THINK in known and END_OF_THINK in known


def reasoning_of(tokenizer: Any, *, opened_by_prompt: bool = False) -> Reasoning:
    """Return how the model of a tokenizer writes its reasoning.

    `opened_by_prompt`: the chat template has written `<think>` before each answer.
    """
    if CHANNEL in tokenizer.get_vocab():
        return Channels(tokenizer)
    return Tags(tokenizer, opened_by_prompt) if has_think_tags(tokenizer) else NoReasoning(tokenizer)
