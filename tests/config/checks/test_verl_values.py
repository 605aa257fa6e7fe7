# SPDX-License-Identifier: Apache-2.0
"""Values that verl would refuse late are refused before Ray; `test_config_rules.py` compares the names."""

from __future__ import annotations

from typing import Any

import pytest

from recipe.async_pipeline.config.checks.refusals import Refusal, Settings, refuse
from recipe.async_pipeline.config.checks.verl_values import VALUES
from recipe.async_pipeline.config.paths import nested
from recipe.async_pipeline.errors import ConfigError

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
OVERLONG = "reward.reward_kwargs.overlong_buffer_cfg"
ATTENTION = "actor_rollout_ref.model.override_config.attn_implementation"
APPLIES: dict[str, Any] = {
    f"{ACTOR}.strategy": "fsdp2",
    "critic.strategy": "megatron",
    "critic.optim.lr_decay_style": "WSD",
    "algorithm.kl_ctrl.type": "adaptive",
    "reward.reward_manager.name": "dapo",
    f"{OVERLONG}.enable": True,
    f"{OVERLONG}.len": 512,
    "data.max_response_length": 512,
}
WRONG: tuple[tuple[str, Any, str], ...] = (
    (f"{ACTOR}.kl_loss_type", "k5", "must be one of kl, k1, "),
    ("algorithm.kl_penalty", "low-var", "must be one of kl, k1, "),
    ("algorithm.kl_ctrl.type", "adaptiv", "must be one of fixed, adaptive, got 'adaptiv'"),
    (f"{ACTOR}.fsdp_config.model_dtype", "bf17", "must be one of fp32, float32, bf16, "),
    (f"{ACTOR}.optim.lr_scheduler_type", "linear", "must be one of constant, cosine, got 'linear'"),
    (f"{ACTOR}.optim.lr_scheduler_type", "cosin", "must be one of constant, cosine, got 'cosin'"),
    (f"{ACTOR}.optim.lr_warmup_steps", None, "must be a whole number with FSDP, got None; -1 takes"),
    (f"{ACTOR}.optim.clip_grad", 0, "must be a number > 0 with FSDP, got 0; at 0 nothing would be trained"),
    (f"{ACTOR}.optim.weight_decay", None, "must be a number >= 0, got None; leave it out"),
    (f"{ACTOR}.optim.min_lr_ratio", 1.5, "must be a number from 0 to 1, got 1.5"),
    (f"{ACTOR}.optim.betas", [0.9, 1], "must be two numbers >= 0 and < 1, got [0.9, 1]"),
    (f"{ACTOR}.optim.betas", [0.9, "b"], "must be two numbers >= 0 and < 1"),
    ("critic.optim.optimizer", "AdamW", "must be one of adam, sgd, muon, got 'AdamW'"),
    ("critic.optim.lr_decay_style", "inverse_square_root", "must be one of constant, linear, cosine, "),
    ("critic.optim.lr_wsd_decay_style", "sqrt", "must be one of linear, cosine, exponential, minus_sqrt, "),
    ("critic.megatron.dtype", "bf16", "must be one of bfloat16, float16, float32, got 'bf16'"),
    ("critic.fsdp.mixed_precision.reduce_dtype", "fp8", "must be one of fp32, "),
    (f"{ACTOR}.entropy_coeff", None, "must be a number, got None"),
    (ATTENTION, "flash", "must be one of eager, sdpa, "),
    (f"{OVERLONG}.len", 513, "must be from 1 to reward.reward_kwargs.max_resp_len, "),
    (f"{OVERLONG}.len", None, "must be from 1 to "),
    ("algorithm.gamma", 99, "must be a number from 0 to 1, got 99"),
    ("algorithm.kl_ctrl.target_kl", 0, "must be a number > 0 with kl_ctrl.type=adaptive, got 0"),
    ("trainer.test_freq", None, "must be a whole number, got None; -1 validates at the start only"),
    ("data.train_max_samples", None, "must be a whole number, got None; -1 takes all rows"),
    (f"{ROLLOUT}.prometheus.port", 99999999, "must be a port, got 99999999; leave it out"),
    ("data.dataloader_num_workers", -1, "must be >= 0, got -1"),
    ("data.seed", "abc", "must be a whole number, or null, got 'abc'; null leaves it to verl"),
    ("trainer.log_val_generations", -1, "must be >= 0, got -1; 0 logs none"),
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
    ("data.seed", None),
    (ATTENTION, "kernels-community/flash-attn"),
    (ATTENTION, None),
    (f"{ACTOR}.kl_loss_type", "k3+"),
    (f"{ACTOR}.fsdp_config.model_dtype", "bf16"),
    (f"{ACTOR}.optim.lr_scheduler_type", "cosine"),
    (f"{ACTOR}.optim.clip_grad", float("inf")),
    (f"{ACTOR}.optim.betas", [0.9, 0.95]),
    (f"{ACTOR}.optim.betas", None),
    (f"{ACTOR}.entropy_coeff", -0.01),
    ("critic.optim.lr_decay_style", "inverse-square-root"),
    ("critic.optim.clip_grad", 0),
    ("critic.optim.lr_warmup_steps", None),
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
