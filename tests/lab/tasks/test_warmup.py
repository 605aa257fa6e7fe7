# SPDX-License-Identifier: Apache-2.0
"""The warm-up: what it trains on, when it stops, and what it restores."""

from __future__ import annotations

from typing import Any

import pytest

from recipe.async_pipeline.errors import ConfigError, WarmupFailed
from recipe.async_pipeline.lab.tasks import warmup
from recipe.async_pipeline.lab.tasks.model import ModelSpec, make_model
from recipe.async_pipeline.lab.tasks.task import Problem, TaskSpec, split_problems
from recipe.async_pipeline.lab.tasks.tokenizer import make_tokenizer
from recipe.async_pipeline.lab.tasks.warmup import (
    Addition,
    WarmupSpec,
    collate,
    encode_example,
    sampled_accuracy,
)

SPLIT = split_problems(TaskSpec(max_operand=13, num_val=4), seed=0)
SHORT = {"num_slip_steps": 1, "batch_size": 4, "check_every": 1, "num_checked": 4}


@pytest.mark.parametrize(
    "wrong", [{"slip_rate": 1.5}, {"taught_accuracy": -0.1}, {"batch_size": 0}, {"num_threads": 0}]
)
def test_an_impossible_warm_up_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"warmup {next(iter(wrong))}"):
        WarmupSpec(**wrong)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    return make_tokenizer()


def test_only_answers_are_labelled(tokenizer: Any) -> None:
    short, long = (encode_example(tokenizer, Problem(1, 2), answer) for answer in ("3", "345"))
    ids, labels = collate([short, long], pad_id=0)
    assert ids == [[*short[0], 0, 0], long[0]]
    assert labels == [[-100] * 4 + [*short[0][4:], -100, -100], [-100] * 4 + long[0][4:]]
    assert tokenizer.decode(long[0]) == "1+2=345<|im_end|>"


@pytest.fixture
def model(tokenizer: Any) -> Any:
    return make_model(ModelSpec(num_layers=1, hidden_size=32, intermediate_size=32), tokenizer, seed=0)


@pytest.mark.real_engine
def test_a_policy_that_does_not_learn_in_time_is_an_error(tokenizer: Any, model: Any) -> None:
    spec = WarmupSpec(taught_accuracy=1.0, max_taught_steps=2, **SHORT)
    with pytest.raises(WarmupFailed, match="after 2 steps"):
        Addition(SPLIT, model, tokenizer, spec, seed=0, report=lambda _: None).run()


@pytest.mark.real_engine
def test_a_policy_ruined_by_the_second_phase_is_an_error(tokenizer: Any, model: Any) -> None:
    spec = WarmupSpec(taught_accuracy=0.0, min_accuracy=1.0, max_slip_steps=2, **SHORT)
    with pytest.raises(WarmupFailed, match="needs 1.0 to start"):
        Addition(SPLIT, model, tokenizer, spec, seed=0, report=lambda _: None).run()


@pytest.mark.real_engine
def test_the_second_phase_continues_while_the_policy_is_too_weak(
    tokenizer: Any, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = iter([0.0, 0.0, 0.0, 0.5])
    monkeypatch.setattr(warmup, "sampled_accuracy", lambda *_: next(measured))
    lines: list[str] = []
    spec = WarmupSpec(taught_accuracy=0.0, min_accuracy=0.1, **SHORT)
    assert Addition(SPLIT, model, tokenizer, spec, seed=0, report=lines.append).run() == 0.5
    assert lines[1:] == [
        f"warm-up 2 of 2, on answers with errors: {step} steps, success 0.00; RL needs 0.10"
        for step in (1, 2)
    ]


@pytest.mark.real_engine
def test_warm_up_trains_reports_and_restores_torchs_state(tokenizer: Any, model: Any) -> None:
    import torch

    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    threads = torch.get_num_threads()
    before = model.lm_head.weight.clone()
    lines: list[str] = []
    spec = WarmupSpec(taught_accuracy=0.0, min_accuracy=0.0, num_threads=threads + 1, **SHORT)
    accuracy = Addition(SPLIT, model, tokenizer, spec, seed=0, report=lines.append).run()
    assert accuracy == 0.0
    assert lines == ["warm-up 1 of 2, supervised: 1 steps, success 0.00; ends at 0.00"]
    assert not torch.equal(model.lm_head.weight, before)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.real_engine
def test_accuracy_counts_responses_correct_up_to_the_end_token(tokenizer: Any, model: Any) -> None:
    import torch

    class Scripted:
        """Responds 46 to every prompt; ends the response or continues."""

        def __init__(self, closes: bool) -> None:
            self.tail = tokenizer.eos_token_id if closes else tokenizer.encode("0")[0]

        def eval(self) -> None: ...

        def train(self) -> None: ...

        def generate(self, prompts: Any, **_: Any) -> Any:
            answer = torch.tensor([[*tokenizer.encode("46"), self.tail]])
            return torch.cat([prompts, answer.expand(len(prompts), -1)], dim=1)

    asked = [Problem(12, 34), Problem(12, 35), Problem(30, 16), Problem(1, 2)]
    scripted: Any = Scripted(closes=True)
    assert sampled_accuracy(scripted, tokenizer, asked) == 0.5
    scripted = Scripted(closes=False)
    assert sampled_accuracy(scripted, tokenizer, asked) == 0.0
