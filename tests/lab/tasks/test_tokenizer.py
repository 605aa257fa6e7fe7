# SPDX-License-Identifier: Apache-2.0
"""The tokenizer: one token per byte, one template, and the ids that verl produces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.async_pipeline.lab.tasks.task import Problem
from recipe.async_pipeline.lab.tasks.tokenizer import (
    EOS_TOKEN,
    PAD_TOKEN,
    VOCAB_SIZE,
    answer_ids,
    make_tokenizer,
    prompt_ids,
    prompt_messages,
)

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("transformers")
pytestmark = pytest.mark.real_engine


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


def test_the_length_equals_the_models_vocabulary(tokenizer: Any) -> None:
    assert len(tokenizer) == VOCAB_SIZE
    assert sorted(tokenizer.get_vocab().values()) == list(range(VOCAB_SIZE))


def test_a_newline_is_one_token_and_the_end_of_turn_is_known(tokenizer: Any) -> None:
    assert len(tokenizer.encode("\n", add_special_tokens=False)) == 1
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == tokenizer.eos_token_id
    assert tokenizer.eos_token == EOS_TOKEN
    assert tokenizer.pad_token == PAD_TOKEN
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_text_without_special_tokens_round_trips(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    if PAD_TOKEN not in text and EOS_TOKEN not in text:
        assert len(ids) == len(text.encode())
        assert tokenizer.decode(ids) == text


@given(left=st.integers(min_value=0, max_value=999), right=st.integers(min_value=0, max_value=999))
def test_the_prompt_ids_are_the_bare_prompt_digit_by_digit(tokenizer: Any, left: int, right: int) -> None:
    problem = Problem(left, right)
    ids = prompt_ids(tokenizer, prompt_messages(problem))
    assert tokenizer.decode(ids) == problem.prompt
    assert len(ids) == len(problem.prompt)


def test_an_answer_ends_with_the_end_token_and_nothing_else_special(tokenizer: Any) -> None:
    ids = answer_ids(tokenizer, "146")
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == "146"
    assert len(ids) == 4


def test_a_longer_chat_only_appends(tokenizer: Any) -> None:
    messages = [*prompt_messages(Problem(1, 2)), {"role": "assistant", "content": "3"}]
    longer = [*messages, *prompt_messages(Problem(3, 4))]
    ids = prompt_ids(tokenizer, longer)
    assert ids[: len(prompt_ids(tokenizer, messages))] == prompt_ids(tokenizer, messages)
    assert tokenizer.decode(ids) == "1+2=3<|im_end|>\n3+4="


def test_saving_and_loading_keeps_ids_and_template(tokenizer: Any, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    messages = prompt_messages(Problem(12, 34))
    assert len(loaded) == VOCAB_SIZE
    assert prompt_ids(loaded, messages) == prompt_ids(tokenizer, messages)
    assert (loaded.eos_token_id, loaded.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
