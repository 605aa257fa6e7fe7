# SPDX-License-Identifier: Apache-2.0
"""Values that verl would refuse late are refused before Ray; `test_config_rules.py` compares the names."""

from __future__ import annotations

from typing import Any

import pytest

from recipe.async_pipeline.config.paths import nested
from recipe.async_pipeline.config.refusals import Refusal, Settings, refuse
from recipe.async_pipeline.config.verl_values import VALUES
from recipe.async_pipeline.errors import ConfigError

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
APPLIES: dict[str, Any] = {f"{ACTOR}.strategy": "fsdp2", "critic.strategy": "fsdp"}
WRONG: tuple[tuple[str, Any, str], ...] = (
    (f"{ACTOR}.kl_loss_type", "k5", "must be one of kl, k1, "),
    ("algorithm.kl_penalty", "low-var", "must be one of kl, k1, "),
    ("algorithm.kl_ctrl.type", "adaptiv", "must be one of fixed, adaptive, got 'adaptiv'"),
    (f"{ACTOR}.fsdp_config.model_dtype", "bf17", "must be one of fp32, float32, bf16, "),
    (f"{ACTOR}.optim.lr_scheduler_type", "linear", "must be one of constant, cosine, got 'linear'"),
    ("critic.optim.lr_scheduler_type", "cosin", "must be one of constant, cosine, got 'cosin'"),
    (f"{ROLLOUT}.temperature", -1, "must be a number > 0, since log-probs are divided by it, got -1"),
    (f"{ROLLOUT}.temperature", 0, "must be a number > 0"),
    (f"{ROLLOUT}.top_p", 1.5, "must be > 0 and <= 1, got 1.5"),
    (f"{ROLLOUT}.top_k", -2, "must be a whole number >= -1, got -2"),
    (f"{ROLLOUT}.val_kwargs.temperature", -0.1, "must be a number >= 0, got -0.1"),
    ("data.max_prompt_length", -1, "must be >= 1, got -1"),
    ("data.max_response_length", 0, "must be >= 1, got 0"),
    (f"{ACTOR}.optim.lr", "abc", "must be a number >= 0, got 'abc'"),
    (f"{ACTOR}.optim.lr", float("nan"), "must be a number >= 0, got nan"),
)
ALLOWED: tuple[tuple[str, Any], ...] = (
    (f"{ACTOR}.kl_loss_type", "k3+"),
    (f"{ACTOR}.fsdp_config.model_dtype", "bf16"),
    ("critic.optim.lr_scheduler_type", "cosine"),
    (f"{ROLLOUT}.val_kwargs.temperature", 0),
    (f"{ROLLOUT}.top_k", -1),
    (f"{ACTOR}.optim.lr", 0),
    (f"{ACTOR}.optim.lr_scheduler_type", None),
)


@pytest.mark.parametrize(("path", "value", "line"), WRONG)
def test_a_wrong_value_is_refused(path: str, value: Any, line: str) -> None:
    with pytest.raises(ConfigError) as refused:
        refuse(VALUES, Settings(_given(path, value)))
    assert any(problem.startswith(f"{path} {line}") for problem in refused.value.problems), refused.value


@pytest.mark.parametrize(("path", "value"), ALLOWED)
def test_a_value_that_verl_takes_is_accepted(path: str, value: Any) -> None:
    assert not [
        row for row in VALUES if row.path == path and row.when(Settings(APPLIED)) and not row.allowed(value)
    ]


@pytest.mark.parametrize("row", VALUES, ids=lambda row: row.path)
def test_a_row_reads_as_a_sentence(row: Refusal) -> None:
    assert row.rule.startswith("must ") and row.remedy and "\n" not in row.rule + row.remedy
    assert not row.allowed("nonsense")


def _given(path: str, value: Any) -> dict[str, Any]:
    return nested({**APPLIES, path: value})


APPLIED = nested(APPLIES)
