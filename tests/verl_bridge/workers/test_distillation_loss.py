# SPDX-License-Identifier: Apache-2.0
"""verl's losses of distillation, as a worker calls them, equal loops in plain Python floats."""

from __future__ import annotations

import math
import random
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.conftest import Load

pytestmark = pytest.mark.real_engine

LENGTHS = [(2, 3), (1, 5), (3, 1)]
"""Tokens of prompt and response of each row."""
VOCABULARY, TOPK, CLIP = 7, 3, 0.2


@pytest.fixture(scope="module")
def registry(load: Load) -> ModuleType:
    return load("recipe.async_pipeline.verl_bridge.workers.loss_registry")


def jagged(rows: list[Any], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.tensor(r, dtype=dtype) for r in rows], layout=torch.jagged)


def responses_of(values: list[list[Any]]) -> list[list[Any]]:
    """Return what belongs to the tokens of the responses: the value before each of them."""
    return [
        row[prompt - 1 : prompt + response - 1]
        for row, (prompt, response) in zip(values, LENGTHS, strict=True)
    ]


class Case:
    """Rows with random log-probs of student and teacher, under all tokens of prompt and response."""

    def __init__(self, load: Load, mode: str, **settings: Any) -> None:
        draw = random.Random(3)

        def values(shift: float = 0.0) -> list[list[float]]:
            return [[draw.uniform(-3, 0) + shift for _ in range(p + r)] for p, r in LENGTHS]

        self.now, self.teacher = values(), values()
        self.old = [[value + draw.uniform(-0.5, 0.5) for value in row] for row in responses_of(self.now)]
        self.weights = [[draw.uniform(0.2, 2.0) for _ in range(r)] for _, r in LENGTHS]
        self.mask = [[1] * r for _, r in LENGTHS]
        self.mask[1][2] = 0
        self.logits = [
            [[draw.gauss(0, 2) for _ in range(VOCABULARY)] for _ in range(p + r)] for p, r in LENGTHS
        ]
        self.ids = [[draw.sample(range(VOCABULARY), TOPK) for _ in range(p + r)] for p, r in LENGTHS]
        self.top = [[[draw.uniform(-3, -1) for _ in range(TOPK)] for _ in range(p + r)] for p, r in LENGTHS]
        configs = load("verl.workers.config")
        loss = configs.DistillationLossConfig(
            loss_mode=mode,
            topk=TOPK,
            use_task_rewards=False,
            loss_max_clamp=None,
            log_prob_min_clamp=None,
            **settings,
        )
        section = configs.ActorConfig(strategy="fsdp2", rollout_n=1, use_dynamic_bsz=True)
        self.given = {
            "config": section,
            "distillation_config": configs.DistillationConfig(distillation_loss=loss),
        }

    def data(self, load: Load, *, topk: bool = False) -> Any:
        tokens = {"prompts": [[0] * p for p, _ in LENGTHS], "responses": [[0] * r for _, r in LENGTHS]}
        teacher = self.top if topk else [[[value] for value in row] for row in self.teacher]
        return load("verl.utils.tensordict_utils").get_tensordict(
            {
                **{name: jagged(rows, torch.int64) for name, rows in tokens.items()},
                "response_mask": jagged(self.mask, torch.int64),
                "old_log_probs": jagged(self.old),
                "rollout_is_weights": jagged(self.weights),
                "advantages": jagged(self.old),
                "teacher_logprobs": jagged(teacher),
                "teacher_ids": jagged(self.ids, torch.int64),
            },
            {"dp_size": 1, "batch_num_tokens": sum(map(sum, self.mask)), "global_batch_size": len(LENGTHS)},
        )

    def mean(self, of_tokens: list[list[float]]) -> float:
        pairs = [
            (value, real)
            for row, mask in zip(of_tokens, self.mask, strict=True)
            for value, real in zip(row, mask, strict=True)
        ]
        return sum(value * real for value, real in pairs) / sum(real for _, real in pairs)


def test_a_policy_gradient_is_weighed_by_ratio_and_correction(load: Load, registry: ModuleType) -> None:
    """The advantage of a token is the teacher's log-prob minus the policy's."""
    case = Case(load, "k1", use_policy_gradient=True)
    loss, _ = registry.distillation_loss(
        data=case.data(load), model_output={"log_probs": jagged(case.now)}, dp_group=None, **case.given
    )

    def token(now: float, old: float, teacher: float, weight: float) -> float:
        ratio, advantage = math.exp(now - old), teacher - now
        clipped = min(max(ratio, 1 - CLIP), 1 + CLIP)
        surrogate = min(ratio * advantage, clipped * advantage)
        if advantage < 0:
            surrogate = max(surrogate, 3.0 * advantage)
        return -surrogate * weight

    rows = zip(responses_of(case.now), case.old, responses_of(case.teacher), case.weights, strict=True)
    wanted = case.mean([[token(*one) for one in zip(*row, strict=True)] for row in rows])
    assert loss.item() == pytest.approx(wanted, rel=1e-9)


def test_a_supervised_estimate_needs_no_weights(load: Load, registry: ModuleType) -> None:
    case = Case(load, "k3", use_policy_gradient=False)
    loss, _ = registry.distillation_loss(
        data=case.data(load), model_output={"log_probs": jagged(case.now)}, dp_group=None, **case.given
    )
    gaps = [
        [teacher - now for now, teacher in zip(*row, strict=True)]
        for row in zip(responses_of(case.now), responses_of(case.teacher), strict=True)
    ]
    assert loss.item() == pytest.approx(
        case.mean([[math.exp(g) - g - 1 for g in row] for row in gaps]), rel=1e-9
    )


def test_the_likeliest_tokens_of_the_teacher_are_compared_at_each_position(
    load: Load, registry: ModuleType
) -> None:
    case = Case(load, "forward_kl_topk", use_policy_gradient=False)
    data = case.data(load, topk=True)
    flat = torch.tensor([logits for row in case.logits for logits in row], dtype=torch.float64)
    found = registry.distillation_loss(student_logits=flat[None], data=data, **case.given)
    offsets = data["teacher_ids"].offsets()
    output = {
        name: torch.nested.nested_tensor_from_jagged(values.squeeze(0), offsets)
        for name, values in found.items()
    }
    loss, metrics = registry.distillation_loss(data=data, model_output=output, dp_group=None, **case.given)

    def position(logits: list[float], ids: list[int], teacher: list[float]) -> float:
        total = math.log(sum(map(math.exp, logits)))
        kl = sum(math.exp(p) * (p - (logits[i] - total)) for i, p in zip(ids, teacher, strict=True))
        return max(0.0, kl)

    rows = zip(case.logits, case.ids, case.top, strict=True)
    of_positions = [[position(*one) for one in zip(*row, strict=True)] for row in rows]
    assert loss.item() == pytest.approx(case.mean(responses_of(of_positions)), rel=1e-5)
    assert metrics["distillation/teacher_mass"] > 0
