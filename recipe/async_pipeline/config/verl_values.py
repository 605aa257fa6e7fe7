# SPDX-License-Identifier: Apache-2.0
"""Values that verl would refuse late: in a worker, at the first batch, or at the first update.

verl has these names in branches of functions, so that they are listed here; a test compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .refusals import (
    Refusal,
    must_be_one_of,
    must_be_positive,
    number_above,
    number_from,
    share,
    whole,
)
from .training_engine import ACTOR, SHARDED

KL = ("kl", "k1", "k1+", "abs", "abs+", "mse", "k2", "low_var_kl", "low_var_kl+", "k3", "k3+")
"""With a plus, the gradient is that of k2."""
KL_CONTROLLERS = ("fixed", "adaptive")
DTYPES = ("fp32", "float32", "bf16", "bfloat16", "fp16", "float16", 32, 16)
TRUNCATIONS = ("left", "right", "middle", "error")
SCHEDULERS = ("constant", "cosine")
"""Of FSDP; Megatron reads `lr_decay_style`."""

_ROLLOUT = "actor_rollout_ref.rollout"


def _or_absent(allowed: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or allowed(value)


def _one_of(path: str, values: Sequence[Any], remedy: str) -> Refusal:
    row = must_be_one_of(path, values, remedy)
    return row._replace(allowed=_or_absent(row.allowed))


def _scheduler(model: str) -> Refusal:
    row = _one_of(f"{model}.optim.lr_scheduler_type", SCHEDULERS, "FSDP has no others")
    return row._replace(when=lambda at: at[f"{model}.strategy"] in SHARDED)


def _sampling(section: str, least: Callable[[Any], bool], rule: str) -> tuple[Refusal, ...]:
    return (
        Refusal(f"{section}.temperature", least, rule, "1 samples from the policy itself"),
        Refusal(
            f"{section}.top_p",
            share,
            "must be > 0 and <= 1",
            "1 samples from all tokens",
        ),
        Refusal(
            f"{section}.top_k",
            lambda value: value is None or (whole(value) and value >= -1),
            "must be a whole number >= -1",
            "-1 samples from all tokens",
        ),
    )


VALUES: tuple[Refusal, ...] = (
    _one_of(f"{ACTOR}.kl_loss_type", KL, "low_var_kl is verl's default"),
    _one_of("algorithm.kl_penalty", KL, "kl is verl's default"),
    _one_of("algorithm.kl_ctrl.type", KL_CONTROLLERS, "fixed is verl's default"),
    *(
        _one_of(path, DTYPES, "fp32 is verl's default")
        for path in (
            f"{ACTOR}.fsdp_config.model_dtype",
            "actor_rollout_ref.ref.fsdp_config.model_dtype",
            "critic.fsdp.model_dtype",
        )
    ),
    *(
        _one_of(f"{ACTOR}.fsdp_config.mixed_precision.{part}_dtype", DTYPES, "leave it out")
        for part in ("param", "reduce", "buffer")
    ),
    _one_of("data.truncation", TRUNCATIONS, "error refuses prompts that are too long"),
    _scheduler(ACTOR),
    _scheduler("critic"),
    *_sampling(_ROLLOUT, number_above(0), "must be a number > 0, since log-probs are divided by it"),
    *_sampling(f"{_ROLLOUT}.val_kwargs", number_from(0), "must be a number >= 0"),
    must_be_positive("data.max_prompt_length", "it is the tokens of the longest prompt"),
    must_be_positive("data.max_response_length", "it is the tokens of the longest response"),
    must_be_positive(f"{_ROLLOUT}.val_kwargs.n", "it is the responses to each prompt of a validation"),
    must_be_positive(f"{_ROLLOUT}.agent.num_workers", "they run the agent loops"),
    must_be_positive(f"{ACTOR}.ppo_epochs", "it is the passes over each batch"),
    must_be_positive("trainer.total_epochs", "it is the passes over the data"),
    *(
        Refusal(path, number_from(0), "must be a number >= 0", "e.g. 1e-6")
        for path in (f"{ACTOR}.optim.lr", "critic.optim.lr")
    ),
    Refusal(
        "algorithm.kl_ctrl.horizon",
        number_above(0),
        "must be a number > 0 with kl_ctrl.type=adaptive",
        "10000 is verl's default",
        when=lambda at: at["algorithm.kl_ctrl.type"] == "adaptive",
    ),
    _one_of(
        f"{_ROLLOUT}.multi_turn.tool_response_truncate_side",
        ("left", "right", "middle"),
        "middle is verl's default",
    ),
)
