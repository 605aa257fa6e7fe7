# SPDX-License-Identifier: Apache-2.0
"""Compare the tokens between two turns with what the chat template writes there.

verl's Continuous Token appends each turn to the tokens so far, with a builder for the family of the model.
Its default builder, for other families, loses what a template writes between an end token and the next turn.
The policy then reads, from its second turn on, what its template never writes. Neither rewards nor log-probs
show that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from transformers import PretrainedConfig
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

from ....config.knobs.agentic import AGENT_LOOP, VERLS_AGENT_LOOP
from ....config.paths import select
from .. import diffusion_loop

logger = logging.getLogger(__name__)
ANSWER = "answer-2"


def warn(config: Any, tokenizer: Any, say: Callable[[str], None]) -> None:
    """Say so if the turns of episodes differ from the template; no-op for a run of single turns.

    A template that refuses the conversation is left to the episodes, which fail with its message.
    """
    if select(config, AGENT_LOOP) in (None, VERLS_AGENT_LOOP, diffusion_loop.NAME):
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
