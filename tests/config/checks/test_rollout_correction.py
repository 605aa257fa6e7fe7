# SPDX-License-Identifier: Apache-2.0
"""The words on loss and correction say what the run computes; a parameter that a worker would refuse is
refused here. Names of losses load without torch.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from recipe.async_pipeline.config.checks.rollout_correction import (
    CORRECTION,
    ESTIMATOR,
    POLICY_LOSS,
    check_estimator,
    check_loss,
    check_loss_parameters,
    describe_correction,
)
from recipe.async_pipeline.config.keys.foreign_keys import LOSS_OF_VARIANT, OWN_LOSSES
from recipe.async_pipeline.config.paths import nested
from recipe.async_pipeline.errors import ConfigError
from tests import REPOSITORY
from tests.refusals import Refused, cases_of


def test_every_variant_of_roll_has_a_loss() -> None:
    assert set(LOSS_OF_VARIANT) == {"vanilla", "ppo", "tis", "topr", "cispo", "kimi15"}
    assert set(OWN_LOSSES) < set(LOSS_OF_VARIANT.values())


def test_the_plain_policy_gradient_is_not_verls_vanilla() -> None:
    assert LOSS_OF_VARIANT["ppo"] == "vanilla"
    assert LOSS_OF_VARIANT["vanilla"] not in ("vanilla", "ppo")


def test_names_load_without_torch() -> None:
    module = "recipe.async_pipeline.config.keys.foreign_keys"
    code = f"import sys, {module}; print({{'torch', 'verl', 'ray'}} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=REPOSITORY
    )
    assert done.stdout.strip() == "set()"


TIS = [(f"{POLICY_LOSS}.loss_mode", "tis")]
KNOWN = ("vanilla", "gspo", "dro", "tis", "bypass_mode")


@cases_of("loss")
def test_an_invalid_loss_is_refused(case: Refused) -> None:
    check_loss_parameters({})
    case.replay(lambda changes: check_loss(nested(changes), KNOWN))


def test_where_other_code_may_add_losses_any_name_may_be_one() -> None:
    check_loss(nested({f"{POLICY_LOSS}.loss_mode": "mine"}), None)


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
    config = nested({f"{CORRECTION}.{name}": value for name, value in section.items()})
    assert describe_correction(config, old_logp, 3) == words


def test_no_lag_requires_no_correction() -> None:
    assert describe_correction({}, "trainer", 0) == "none"


@pytest.mark.parametrize("mode", ["policy_gradient", "gpg"])
def test_a_loss_without_a_ratio_does_not_correct(mode: str) -> None:
    words = describe_correction(nested({f"{POLICY_LOSS}.loss_mode": mode}), "rollout", 2)
    assert words == (
        "none: the loss has no ratio, though responses may have lag 2; set pg_variant=tis to correct for it"
    )


def test_an_estimator_that_verl_does_not_have() -> None:
    check_estimator(nested({ESTIMATOR: "grpo"}), ("gae", "grpo", "remax"))
    with pytest.raises(ConfigError) as caught:
        check_estimator(nested({ESTIMATOR: "grppo"}), ("gae", "grpo", "remax"))
    assert str(caught.value) == (
        f"{ESTIMATOR} must be one of gae, grpo, got 'grppo' (did you mean 'grpo'?); correct it"
    )
