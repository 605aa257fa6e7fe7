# SPDX-License-Identifier: Apache-2.0
"""How families of models write conversations, for the tokenizer of the toy's model."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from recipe.async_pipeline.lab.tasks.tokenizer import make_tokenizer


class Family(NamedTuple):
    """How the models of a family write a conversation."""

    opened: dict[str, str]
    """Before the text of a message, by its role."""
    closed: str
    """After a message, the assistant's included."""
    end: str
    """The token at which the engine stops."""


_CHATML = ("<|im_start|>", "<|im_end|>\n", "<|im_end|>")
FAMILIES = {
    "qwen2": Family({role: f"<|im_start|>{role}\n" for role in ("user", "assistant", "tool")}, *_CHATML[1:]),
    "qwen3": Family({role: f"<|im_start|>{role}\n" for role in ("user", "assistant", "tool")}, *_CHATML[1:]),
    "minimax_m2": Family(
        {"user": "]~b]user\n", "assistant": "]~b]ai\n", "tool": "]~b]tool\n"}, "[e~[\n", "[e~["
    ),
    # The next message begins with the token that ends a turn.
    "glm4_moe": Family(
        {"user": "<|user|>\n", "assistant": "<|assistant|>\n", "tool": "<|observation|>\n"}, "", "<|user|>"
    ),
    "deepseek_v3": Family(
        {"user": "<\uff5cUser\uff5c>", "assistant": "<\uff5cAssistant\uff5c>", "tool": "<\uff5ctool\uff5c>"},
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    ),
    # A family that verl has no builder for.
    "llama": Family(
        {role: f"<|header|>{role}<|text|>\n\n" for role in ("user", "assistant", "tool")},
        "<|eot|>",
        "<|eot|>",
    ),
}
SPECIAL = re.compile(r"<\|[^|<]*\|?>|<\uff5c[^<]*?\uff5c>|\]~b\]|\[e~\[")


def tokenizer_of(family: Family) -> Any:
    """Return the toy's tokenizer with the special tokens and the turns of a family."""
    texts = "".join((*family.opened.values(), family.closed, family.end))
    tokenizer = make_tokenizer()
    specials = sorted({*SPECIAL.findall(texts), "<|observation|>", "<|user|>"})
    tokenizer.add_special_tokens({"additional_special_tokens": specials, "eos_token": family.end})
    opened = ", ".join(f"{role!r}: {text!r}" for role, text in family.opened.items())
    tokenizer.chat_template = (
        f"{{%- set opened = {{{opened}, 'system': ''}} -%}}"
        "{%- for message in messages -%}"
        f"{{{{- opened[message['role']] + message['content'] + {family.closed!r} -}}}}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- opened['assistant'] -}}{%- endif -%}"
    )
    return tokenizer
