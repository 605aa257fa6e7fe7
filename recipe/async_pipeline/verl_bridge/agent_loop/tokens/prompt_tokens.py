# SPDX-License-Identifier: Apache-2.0
"""Prepare the tokens of agent loops once for all responses to a prompt.

For each response verl creates the builder that renders chat templates, and uses it in threads: for the
prompt, which is the same for all responses of a group, and to append the tokens of a turn, which takes less
time than to wake the thread. Agent loops that override the methods of verl's base class keep their own.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple

from cachetools import LRUCache
from omegaconf import DictConfig
from transformers import AutoConfig, PretrainedConfig
from verl.utils.fs import copy_to_local
from verl.utils.model import get_generation_config
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

from ....config.knobs.agentic import AGENT_LOOP, VERLS_AGENT_LOOP
from ....config.paths import select
from ..diffusion_loop import NAME

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


class ModelTokens(NamedTuple):
    """The tokens of a model."""

    vocabulary: int
    """How many ids have an embedding; the tokenizer may know fewer."""
    ends: frozenset[int]
    """Engines always stop at these: the end token of the tokenizer and all of `generation_config.json`."""


def tokens_of(config: DictConfig, tokenizer: Any) -> ModelTokens:
    """Return the tokens of the model of a run; of the tokenizer only if the run names no model."""
    model = config.actor_rollout_ref.get("model") or {}
    path = model.get("hf_config_path") or model.get("path")
    size, ends = (0, frozenset()) if path is None else _of_folder(path, bool(model.get("trust_remote_code")))
    return ModelTokens(size or len(tokenizer), ends | ids(tokenizer.eos_token_id))


def ids(found: Any) -> frozenset[int]:
    """Return ids as configs have them, none, one or a list, as a set."""
    return frozenset([] if found is None else [found] if isinstance(found, int) else found)


def turn_ends(model: ModelTokens, sampling_params: Mapping[str, Any]) -> frozenset[int]:
    """Return the ids after which a turn is whole with these sampling parameters."""
    return model.ends | ids(sampling_params.get("stop_token_ids"))


@lru_cache
def _of_folder(path: str, trusted: bool) -> tuple[int, frozenset[int]]:
    local = copy_to_local(path)
    try:
        config = AutoConfig.from_pretrained(local, trust_remote_code=trusted).get_text_config()
        size = getattr(config, "vocab_size", None) or 0
    except ValueError:
        # An engine may know a type of model that transformers does not.
        size = 0
    generation = get_generation_config(local, trust_remote_code=trusted)
    return size, ids(None if generation is None else generation.eos_token_id)


logger = logging.getLogger(__name__)
ANSWER = "answer-2"


def warn_of_turns(config: Any, tokenizer: Any, say: Callable[[str], None]) -> None:
    """Say so if the turns of episodes differ from the template; no-op for a run of single turns.

    A template that refuses the conversation is left to the episodes, which fail with its message.

    verl's Continuous Token appends each turn to the tokens so far, with a builder for the family of the
    model. Its default builder, for other families, loses what a template writes between an end token and the
    next turn. The policy then reads, from its second turn on, what its template never writes. Neither rewards
    nor log-probs show that.
    """
    if select(config, AGENT_LOOP) in (None, VERLS_AGENT_LOOP, NAME):
        return
    kwargs = dict(select(config, "data.apply_chat_template_kwargs") or {})
    try:
        model_type = PretrainedConfig.get_config_dict(tokenizer.name_or_path)[0].get("model_type")
        builder = create_continuous_token_builder(
            tokenizer, hf_model_type=model_type, chat_template_kwargs=kwargs
        )
        appended, written = between_turns(builder, tokenizer, kwargs)
    except Exception as error:  # noqa: BLE001 - a chat template may raise anything
        logger.warning("the turns of episodes were not compared with the chat template: %s", error)
        return
    # Some models end a turn with a token that their template does not write.
    if written not in (appended, appended.removeprefix(tokenizer.eos_token)):
        say(
            f"WARNING: after an answer, the model's chat template writes {written!r}, but verl's "
            f"{type(builder).__name__} for model type {model_type} appends {appended!r}: from its second "
            "turn on, the policy reads what its template never writes (docs/agents.md#token-exact)"
        )


def between_turns(builder: Any, tokenizer: Any, template_kwargs: dict[str, Any]) -> tuple[str, str]:
    """Return the text between an answer and the next one: as the builder appends it, and by the template."""
    asked = [{"role": "user", "content": "1"}]
    answered = [*asked, {"role": "assistant", "content": ANSWER}]
    whole = [*answered, {"role": "user", "content": "3"}]
    said = [*tokenizer.encode(ANSWER, add_special_tokens=False), tokenizer.eos_token_id]
    merged = builder.merge_context_tokens(answered, whole, [*builder.build_initial_tokens(asked), *said])
    written = tokenizer.apply_chat_template(
        whole, tokenize=False, add_generation_prompt=True, **template_kwargs
    )
    return tokenizer.decode(merged.token_ids).rpartition(ANSWER)[2], written.rpartition(ANSWER)[2]
