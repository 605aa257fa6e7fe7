# SPDX-License-Identifier: Apache-2.0
"""Names of losses load without torch. The test of the loss registry checks the losses."""

from __future__ import annotations

import subprocess
import sys

from recipe.async_pipeline.config.loss_modes import LOSS_OF_VARIANT, OWN_LOSSES
from tests import REPOSITORY


def test_every_variant_of_roll_has_a_loss() -> None:
    assert set(LOSS_OF_VARIANT) == {"vanilla", "ppo", "tis", "topr", "cispo", "kimi15"}
    assert set(OWN_LOSSES) < set(LOSS_OF_VARIANT.values())


def test_the_plain_policy_gradient_is_not_verls_vanilla() -> None:
    assert LOSS_OF_VARIANT["ppo"] == "vanilla"
    assert LOSS_OF_VARIANT["vanilla"] not in ("vanilla", "ppo")


def test_names_load_without_torch() -> None:
    module = "recipe.async_pipeline.config.loss_modes"
    code = f"import sys, {module}; print({{'torch', 'verl', 'ray'}} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=REPOSITORY
    )
    assert done.stdout.strip() == "set()"
