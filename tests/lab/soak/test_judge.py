# SPDX-License-Identifier: Apache-2.0
"""The judge scores exact matches and misbehaves on request."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipe.async_pipeline.lab.soak import judge


def test_the_judge_misbehaves_for_one_response_in_four(tmp_path: Path) -> None:
    control = tmp_path / "judge"

    def score(truth: str, response: str) -> float:
        return judge.score("", response, truth, control=str(control))

    assert (score("4", "4"), score("4", "5")) == (1.0, 0.0)
    control.write_text("raise")
    assert score("5", "5") == 1.0, "one response in four"
    with pytest.raises(RuntimeError, match="requests an exception"):
        score("4", "4")
