# SPDX-License-Identifier: Apache-2.0
"""The names, read without torch. Where they lead is for verl_bridge/test_loss_registry.py to check."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from recipe.async_pipeline.loss_names import LOSS_OF_VARIANT, OWN_LOSSES

REPOSITORY = Path(__file__).resolve().parents[1]


def test_every_variant_of_roll_has_a_loss() -> None:
    assert set(LOSS_OF_VARIANT) == {"vanilla", "ppo", "tis", "topr", "cispo", "kimi15"}
    assert set(OWN_LOSSES) < set(LOSS_OF_VARIANT.values())


def test_the_plain_policy_gradient_is_not_mistaken_for_what_verl_calls_vanilla() -> None:
    assert LOSS_OF_VARIANT["ppo"] == "vanilla"
    assert LOSS_OF_VARIANT["vanilla"] not in ("vanilla", "ppo")


def test_names_cost_no_import_of_torch() -> None:
    code = "import sys, recipe.async_pipeline.loss_names; print({'torch', 'verl', 'ray'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=REPOSITORY
    )
    assert done.stdout.strip() == "set()"
