# SPDX-License-Identifier: Apache-2.0
"""Which runs need a forward pass for old log-probs, and whose log-probs a run takes."""

from __future__ import annotations

from typing import Any

import pytest

from recipe.async_pipeline.config.derived.old_policy import proximal_policy, read_before_update
from recipe.async_pipeline.config.knobs.schema import AsyncPipelineConfig, StalenessConfig, TrainingConfig
from recipe.async_pipeline.config.placement import Placement, Pool
from recipe.async_pipeline.errors import ConfigError

SHARED = Placement((Pool("train", ("train", "logp"), (1,)), Pool("generate", ("generate",), (1,))))
APART = Placement((Pool("train", ("train",), (1,)), Pool("logp", ("logp",), (1,))))


def of_verl(**changes: Any) -> dict[str, Any]:
    """A config of one update a step; `changes` by path, with two underscores for a dot."""
    config: dict[str, Any] = {
        "data": {"train_batch_size": 16},
        "algorithm": {"use_kl_in_reward": False},
        "actor_rollout_ref": {
            "actor": {"strategy": "fsdp2", "ppo_mini_batch_size": 16, "ppo_epochs": 1},
            "rollout": {"name": "vllm"},
        },
    }
    for path, value in changes.items():
        *sections, name = path.split("__")
        section = config
        for one in sections:
            section = section.setdefault(one, {})
        section[name] = value
    return config


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ("actor_rollout_ref__actor__ppo_mini_batch_size", 8),
        ("actor_rollout_ref__actor__ppo_epochs", 2),
        ("actor_rollout_ref__actor__strategy", "veomni"),
        ("actor_rollout_ref__rollout__name", "diffusers"),
        ("algorithm__use_kl_in_reward", True),
        ("algorithm__rollout_correction__rollout_rs", "token_k1"),
        ("algorithm__rollout_correction__rollout_is_batch_normalize", True),
        ("trainer__critic_warmup", 3),
        ("trainer__v1__async_pipeline__custom_stages", ["m:C@a->b"]),
    ],
)
def test_what_reads_them_before_the_update_is_named(change: str, value: Any) -> None:
    reader = read_before_update(of_verl(**{change: value}))
    assert reader is not None and reader.startswith(f"{change.replace('__', '.')}={value}, because ")


def test_one_update_a_step_needs_no_pass() -> None:
    assert read_before_update(of_verl()) is None
    assert read_before_update(of_verl(algorithm__rollout_correction__rollout_is="token")) is None


@pytest.mark.parametrize(
    ("placement", "lag", "reader", "found"),
    [
        (SHARED, 0, None, "update"),
        (SHARED, 3, None, "update"),
        (SHARED, 3, "KEY=1, because", "trainer"),
        (APART, 3, None, "logp_pool"),
        (APART, 0, None, "trainer"),
    ],
)
def test_the_default(placement: Placement, lag: int, reader: str | None, found: str) -> None:
    strategy = "n_step_ahead" if lag else "on_policy"
    knobs = AsyncPipelineConfig(strategy=strategy, staleness=StalenessConfig(max_lag=lag))
    assert proximal_policy(knobs, placement, bypass=False, reader=reader) == found
    assert proximal_policy(knobs, placement, bypass=True, reader=reader) == "rollout"


@pytest.mark.parametrize(
    ("placement", "reader", "why"), [(SHARED, "KEY=1, because", "KEY=1, because"), (APART, None, "pool")]
)
def test_an_update_that_cannot_have_them_is_refused(
    placement: Placement, reader: str | None, why: str
) -> None:
    knobs = AsyncPipelineConfig(training=TrainingConfig(old_logp="update"))
    with pytest.raises(ConfigError, match=f"old_logp must not be update.*{why}.*use auto"):
        proximal_policy(knobs, placement, bypass=False, reader=reader)
