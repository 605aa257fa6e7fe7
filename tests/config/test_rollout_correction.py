# SPDX-License-Identifier: Apache-2.0
"""The words on loss and correction say what the run computes; a parameter that a worker would refuse is
refused here.
"""

from __future__ import annotations

from typing import Any

import pytest

from recipe.async_pipeline.config.rollout_correction import (
    CORRECTION,
    ESTIMATOR,
    POLICY_LOSS,
    check_estimator,
    check_loss,
    check_loss_parameters,
    describe_correction,
)
from recipe.async_pipeline.errors import ConfigError
from tests.fakes.alias_values import nested

TIS = [(f"{POLICY_LOSS}.loss_mode", "tis")]
KNOWN = ("vanilla", "gspo", "dro", "tis")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("tis_upper_bound", "abc", "must be a number, got 'abc'; the default is 1"),
        ("tis_upper_bound", True, "must be a number, got True"),
        ("tis_upper_bound", -1, "must be 0 <= lower <= upper"),
        ("tis_lower_bound", 5, "must be 0 <= lower <= upper"),
        ("tis_lower_bound", float("nan"), "must be 0 <= lower <= upper"),
        ("topr_positive_weight", None, "must be a number >= 0 and finite, got None"),
        ("topr_negative_weight", float("inf"), "must be a number >= 0 and finite"),
        (
            "topr_split",
            "nonsense",
            "must be one of advantage, score, got 'nonsense'; advantage is the default",
        ),
        ("topr_ratio_level", "answer", "must be one of token, sequence"),
    ],
)
def test_a_parameter_that_cannot_be(name: str, value: Any, words: str) -> None:
    check_loss_parameters({})
    with pytest.raises(ConfigError) as caught:
        check_loss(nested((f"{POLICY_LOSS}.loss_mode", "tis"), (f"{POLICY_LOSS}.{name}", value)), KNOWN)
    assert words in str(caught.value)
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        (
            [(f"{POLICY_LOSS}.loss_mode", "gsp")],
            "loss_mode must be one of dro, gspo, tis, vanilla, got 'gsp' (did you mean 'gspo'?)",
        ),
        (
            [(f"{POLICY_LOSS}.loss_mode", "bypass_mode")],
            "loss_mode must not be bypass_mode, which reads the rollout correction",
        ),
        ([*TIS, ("actor_rollout_ref.actor.clip_ratio_c", 0.5)], "clip_ratio_c must be a number > 1, got 0.5"),
        (
            [*TIS, ("actor_rollout_ref.actor.clip_ratio_low", "abc")],
            "clip_ratio_low must be a number > 0, got 'abc'",
        ),
        (
            [*TIS, ("actor_rollout_ref.actor.loss_agg_mode", "foo")],
            "loss_agg_mode must be one of token-mean, ",
        ),
        (
            [*TIS, (f"{CORRECTION}.rollout_iss", 1)],
            "rollout_iss is unknown, got 1 (did you mean 'rollout_is'?)",
        ),
        ([*TIS, (f"{CORRECTION}.bypass_mode", "abc")], "bypass_mode must be True or False, got 'abc'"),
        (
            [*TIS, (f"{CORRECTION}.loss_type", "reinforce")],
            "loss_type must be ppo_clip without algorithm.rollout_correction.bypass_mode, got 'reinforce'",
        ),
        (
            [(f"{POLICY_LOSS}.loss_mode", "dro")],
            "dro_beta must be a number > 0 with loss_mode dro (kimi15), got None",
        ),
        (
            [(f"{POLICY_LOSS}.loss_mode", "dro"), (f"{POLICY_LOSS}.dro_beta", -3)],
            "dro_beta must be a number > 0",
        ),
        (
            [(f"{POLICY_LOSS}.loss_mode", "tis"), (f"{CORRECTION}.rollout_is", "tokens")],
            "rollout_is must be one of token, sequence or null, got 'tokens'",
        ),
    ],
)
def test_an_invalid_loss_is_refused(pairs: list[tuple[str, Any]], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_loss(nested(*pairs), KNOWN)
    assert words in str(caught.value)


def test_where_other_code_may_add_losses_any_name_may_be_one() -> None:
    check_loss(nested((f"{POLICY_LOSS}.loss_mode", "mine")), None)


@pytest.mark.parametrize(
    ("section", "old_logp", "words"),
    [
        (
            {"rollout_is": "token", "rollout_is_threshold": 2.0},
            "trainer",
            "weight of a token: ratio of version s-1 to the versions that generated it, at most 2.0",
        ),
        (
            {"rollout_is": "sequence", "rollout_is_threshold": "0.5_5.0"},
            "logp_pool",
            "weight of a response: ratio of version s-2 to the versions that generated it, "
            "0 outside 0.5 to 5.0",
        ),
        (
            {"rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_is_batch_normalize": True},
            "trainer",
            "weight of a token: ratio of version s-1 to the versions that generated it, at most 2.0, "
            "then scaled to "
            "a mean of 1",
        ),
        (
            {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2"},
            "trainer",
            "mask by token_k1 beyond 0.5_2",
        ),
        ({}, "rollout", "by the loss, whose ratio is to the versions that generated the tokens"),
        (
            {},
            "trainer",
            "none, though responses may have lag 3; "
            "set algorithm.rollout_correction.rollout_is=token to correct "
            "for it",
        ),
    ],
)
def test_a_describe_correction(section: dict[str, Any], old_logp: str, words: str) -> None:
    config = nested(*((f"{CORRECTION}.{name}", value) for name, value in section.items()))
    assert describe_correction(config, old_logp, 3) == words


def test_no_lag_requires_no_correction() -> None:
    assert describe_correction({}, "trainer", 0) == "none"


@pytest.mark.parametrize("mode", ["policy_gradient", "gpg"])
def test_a_loss_without_a_ratio_does_not_correct(mode: str) -> None:
    words = describe_correction(nested((f"{POLICY_LOSS}.loss_mode", mode)), "rollout", 2)
    assert words == (
        "none: the loss has no ratio, though responses may have lag 2; set pg_variant=tis to correct for it"
    )


def test_an_estimator_that_verl_does_not_have() -> None:
    check_estimator(nested((ESTIMATOR, "grpo")), ("gae", "grpo"))
    with pytest.raises(ConfigError) as caught:
        check_estimator(nested((ESTIMATOR, "grppo")), ("gae", "grpo"))
    assert str(caught.value) == (
        f"{ESTIMATOR} must be one of gae, grpo, got 'grppo' (did you mean 'grpo'?); correct it"
    )
