# SPDX-License-Identifier: Apache-2.0
"""Supervised warm-up with the calculator: imitation of a teacher that asks, then of one that also guesses.

As for addition (`warmup`), the result knows more than it shows: it can do short sums and copy a result, and
it errs as its last teacher did. RL has to learn when to ask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from recipe.async_pipeline.lab.tasks.calculator_task.calculator import (
    CALL,
    CalculatorTask,
    CalculatorTeacher,
    Demonstration,
    call_of,
    result_of,
)
from recipe.async_pipeline.lab.tasks.task import Problem
from recipe.async_pipeline.lab.tasks.tokenizer import answer_ids, prompt_ids, prompt_messages
from recipe.async_pipeline.lab.tasks.warmup import IGNORED, Labelled, TextWarmup, WarmupSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

CALCULATOR_WARMUP = WarmupSpec(
    taught_accuracy=0.9, max_taught_steps=3000, slip_rate=0.15, num_slip_steps=100, num_checked=256
)
"""Lengths and rates for sums of two and of four digits.

Calls alone make half of the sums right; the rest of `taught_accuracy` requires the policy to add.
"""
MAX_NEW_TOKENS = 12
"""Tokens of a turn: a call has eleven, and its end."""


def encode_demonstration(
    tokenizer: PreTrainedTokenizerFast, problem: Problem, shown: Demonstration
) -> Labelled:
    """Return an episode, with the tokens that verl's tool agent makes of it.

    Only what the policy writes is labelled.
    """
    ids = prompt_ids(tokenizer, prompt_messages(problem))
    labels = [IGNORED] * len(ids)
    turns = [call_of(problem), shown.answer] if shown.calls else [shown.answer]
    for number, turn in enumerate(turns):
        if number:
            # The chat template ends a turn of the policy with a newline.
            seen = f"\n{result_of(problem.left, problem.right)}"
            told = tokenizer.encode(seen, add_special_tokens=False)
            ids, labels = [*ids, *told], [*labels, *[IGNORED] * len(told)]
        written = answer_ids(tokenizer, turn)
        ids, labels = [*ids, *written], [*labels, *written]
    return ids, labels


def sampled_right(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: Sequence[Problem]
) -> list[tuple[bool, bool]]:
    """Return for each sum whether the policy called the tool and whether its answer was right.

    One episode each, sampled at temperature 1, with one call at most. Uses torch's global random state.
    """
    prompts = [prompt_ids(tokenizer, prompt_messages(problem)) for problem in problems]
    first = _written(model, tokenizer, prompts)
    calls = [CALL.fullmatch(text) for text in first]
    asked = [i for i, call in enumerate(calls) if call is not None]

    second: dict[int, str] = {}
    if asked:
        continued = []
        for i in asked:
            call = calls[i]
            assert call is not None
            told = f"\n{result_of(int(call[1]), int(call[2]))}"
            turn = answer_ids(tokenizer, first[i])
            continued.append([*prompts[i], *turn, *tokenizer.encode(told, add_special_tokens=False)])
        second = dict(zip(asked, _written(model, tokenizer, continued), strict=True))
    return [(i in second, second.get(i, first[i]) == problem.answer) for i, problem in enumerate(problems)]


def _written(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[list[int]]
) -> list[str]:
    """Return a turn after each prompt; one that does not end is the empty text."""
    import torch

    width, pad_id, end = max(map(len, prompts)), tokenizer.pad_token_id, tokenizer.eos_token_id
    padded = torch.tensor([[pad_id] * (width - len(one)) + one for one in prompts])
    model.eval()
    with torch.no_grad():
        output = model.generate(
            padded,
            attention_mask=(padded != pad_id).long(),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            max_new_tokens=MAX_NEW_TOKENS,
        )
    model.train()
    rows = output[:, width:].tolist()
    return [tokenizer.decode(row[: row.index(end)]) if end in row else "" for row in rows]


class CalculatorWarmup(TextWarmup):
    """Sums of two lengths, calls, guesses and wrong digits."""

    def __init__(self, task: CalculatorTask, *given: Any, **settings: Any) -> None:
        super().__init__(*given, **settings)
        self._teacher = CalculatorTeacher(task)
        self._sums, self._held_out = task.problems(self.seed)

    def episodes(self, count: int, slip_rate: float) -> list[Labelled]:
        return [
            encode_demonstration(self.tokenizer, one, self._teacher.show(one, self.rng, slip_rate))
            for one in self.rng.choices(self._sums, k=count)
        ]

    def accuracy(self, *, unseen: bool) -> float:
        count = min(self.spec.num_checked, len(self._sums))
        problems = self._held_out if unseen else self.rng.sample(self._sums, count)
        return sum(right for _, right in sampled_right(self.model, self.tokenizer, problems)) / len(problems)
