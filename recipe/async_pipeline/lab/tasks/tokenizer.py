# SPDX-License-Identifier: Apache-2.0
"""A byte-level tokenizer without merges: one token per byte, so digits and newlines are separate tokens.

verl bans every id at or beyond `len(tokenizer)` in the rollout but not in the trainer, so the model's
vocabulary must have exactly the tokenizer's size. For the Qwen families verl also requires that a newline
is one token and that `<|im_end|>` exists. `make_tokenizer` satisfies all three.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerFast

    from recipe.async_pipeline.lab.tasks.task import Problem

PAD_TOKEN = "<|endoftext|>"
EOS_TOKEN = "<|im_end|>"
VOCAB_SIZE = 256 + 2

# The prompt is the bare content of the user's message: a role header would triple its length and teach
# the model nothing. A finished assistant turn is closed as in the Qwen templates, so that rendering a
# longer conversation only appends tokens.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- message['content'] -}}"
    "{%- if message['role'] == 'assistant' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}"
    "{%- endfor -%}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer: ids 0 to 255 are the bytes, then the pad token and the end-of-sequence token."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([PAD_TOKEN, EOS_TOKEN])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD_TOKEN,
        eos_token=EOS_TOKEN,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def prompt_messages(problem: Problem) -> list[dict[str, str]]:
    """Return the chat that asks for one sum: the content of the `prompt` column."""
    return [{"role": "user", "content": problem.prompt}]


def prompt_ids(tokenizer: PreTrainedTokenizerFast, messages: Sequence[dict[str, str]]) -> list[int]:
    """Return the token ids of a prompt, made as verl's agent loop makes them.

    Warm-up must use the same ids as RL, or the warmed-up model is useless there.
    """
    ids = tokenizer.apply_chat_template(
        list(messages), tokenize=True, add_generation_prompt=True, tools=None, return_dict=False
    )
    return [int(i) for i in ids]


def answer_ids(tokenizer: PreTrainedTokenizerFast, answer: str) -> list[int]:
    """Return the token ids of a complete answer, closed by the end-of-sequence token."""
    return [*tokenizer.encode(answer, add_special_tokens=False), int(tokenizer.eos_token_id)]
