# SPDX-License-Identifier: Apache-2.0
"""Check that the agent loops can write a conversation with a model's tokenizer.

transformers imports torch, which takes seconds. A process that has not imported verl, such as a plan's, first
renders the chat template as transformers does; what this does not settle, transformers and verl decide.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from .light_verl import is_whole

BUILDER_LOG = "verl.utils.tokenizer.continuous_token_wiring"
CHAT = [{"role": "user", "content": "1"}]
MODEL = "actor_rollout_ref.model"


@cache
def why_no_chat(folder: str, template: str | None, kwargs: str) -> str:
    """Return why the agent loops cannot write a conversation with a tokenizer, or nothing."""
    if not is_whole() and _renders(Path(folder), template, json.loads(kwargs)):
        return ""
    from verl.utils import hf_tokenizer
    from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

    try:
        tokenizer = hf_tokenizer(folder)
    except Exception as error:  # noqa: BLE001  files that anyone wrote
        return f"it cannot be loaded ({in_a_line(error)}); correct {MODEL}.path"
    tokenizer.chat_template = template or tokenizer.chat_template
    if not tokenizer.chat_template:
        return "it has no chat template; take that of the model's chat version, or one of the same family"
    try:
        tokenizer.apply_chat_template(
            CHAT, add_generation_prompt=True, tokenize=True, return_dict=False, **json.loads(kwargs)
        )
        described = _json_of(Path(folder) / "config.json")
        if "vision_config" not in described:  # its builder takes a processor, too
            with _quiet(BUILDER_LOG):  # the workers will say it
                create_continuous_token_builder(tokenizer, hf_model_type=described.get("model_type"))
    except Exception as error:  # noqa: BLE001  a template may raise anything
        return f"its chat template or special tokens do not fit ({in_a_line(error)}); correct them"
    return ""


def _renders(folder: Path, template: str | None, kwargs: Mapping[str, Any]) -> bool:
    """Return whether the tokenizer loads and its template renders, without transformers."""
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from tokenizers import Tokenizer

    settings = _json_of(folder / "tokenizer_config.json")
    file = folder / "chat_template.jinja"
    try:
        text = template or (file.read_text("utf-8") if file.is_file() else settings.get("chat_template"))
        Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokens = {name: str(value) for name, value in settings.items() if name.endswith("_token")}
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
        values = {**tokens, "messages": CHAT, "add_generation_prompt": True, **kwargs}
        return isinstance(text, str) and bool(environment.from_string(text).render(values).strip())
    except Exception:  # noqa: BLE001  a template may raise anything, and need what only transformers has
        return False


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Drop the warnings of a logger."""
    logger = logging.getLogger(name)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _json_of(file: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, Mapping) else {}


def in_a_line(error: Exception) -> str:
    """Return the text of an error on one line."""
    return (" ".join(str(error).split()).rstrip(".") or type(error).__name__)[:300]
