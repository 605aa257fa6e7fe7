# SPDX-License-Identifier: Apache-2.0
"""The warm-up trains on the tokens that verl's tool agent makes, and plays as it does."""

from __future__ import annotations

from typing import Any

import pytest

from recipe.async_pipeline.lab.tasks.calculator_task import calculator_warmup
from recipe.async_pipeline.lab.tasks.calculator_task.calculator import CalculatorTask, Demonstration
from recipe.async_pipeline.lab.tasks.calculator_task.calculator_warmup import (
    CalculatorWarmup,
    encode_demonstration,
    sampled_right,
)
from recipe.async_pipeline.lab.tasks.model import ModelSpec, make_model
from recipe.async_pipeline.lab.tasks.task import Problem
from recipe.async_pipeline.lab.tasks.tokenizer import make_tokenizer
from recipe.async_pipeline.lab.tasks.warmup import IGNORED, WarmupSpec

pytestmark = pytest.mark.real_engine
SUM = Problem(12, 34)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    pytest.importorskip("torch")
    return make_tokenizer()


@pytest.mark.parametrize("calls", [False, True])
def test_only_what_the_policy_writes_is_labelled(tokenizer: Any, calls: bool) -> None:
    ids, labels = encode_demonstration(tokenizer, SUM, Demonstration(calls, "46"))
    call = "[12+34]<|im_end|>\n46>" if calls else ""
    assert tokenizer.decode(ids) == f"12+34={call}46<|im_end|>"
    said = [one for one in labels if one != IGNORED]
    assert tokenizer.decode(said) == f"{'[12+34]<|im_end|>' if calls else ''}46<|im_end|>"
    assert all(label in (IGNORED, one) for one, label in zip(ids, labels, strict=True))


def test_a_call_is_answered_and_the_answer_counts(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    turns = iter([["46", "[12+34]", "[1+1]", "nonsense"], ["46", "46"]])

    def written(model: Any, used: Any, prompts: list[list[int]]) -> list[str]:
        asked.append([tokenizer.decode(one) for one in prompts])
        return next(turns)

    monkeypatch.setattr(calculator_warmup, "_written", written)
    found = sampled_right(None, tokenizer, [SUM] * 4)  # type: ignore[arg-type]
    assert found == [(False, True), (True, True), (True, True), (False, False)]
    assert asked[1] == ["12+34=[12+34]<|im_end|>\n46>", "12+34=[1+1]<|im_end|>\n2>"]


def test_a_model_is_warmed_up(tokenizer: Any) -> None:
    model = make_model(ModelSpec(num_layers=1, hidden_size=32, intermediate_size=32), tokenizer, 0)
    spec = WarmupSpec(
        taught_accuracy=0.0, num_slip_steps=1, max_slip_steps=1, batch_size=2, check_every=1, min_accuracy=0.0
    )
    task, said = CalculatorTask(num_train=6, num_val=4), list[str]()
    right = CalculatorWarmup(task, model, tokenizer, spec, seed=0, report=said.append).run()
    assert 0.0 <= right <= 1.0 and said
