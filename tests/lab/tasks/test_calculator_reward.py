# SPDX-License-Identifier: Apache-2.0
"""verl loads the rule by path, so it imports the standard library only."""

from __future__ import annotations

import runpy

from recipe.async_pipeline.lab.tasks.calculator_build import REWARD_FILE


def test_it_runs_alone() -> None:
    loaded = runpy.run_path(str(REWARD_FILE))
    assert loaded["compute_score"]("", "[12+34]\n46>46", "46")["score"] == 0.8
