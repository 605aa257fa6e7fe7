# SPDX-License-Identifier: Apache-2.0
"""Right or wrong, slow or mad."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipe.async_pipeline.soak import judge


def test_the_judge_does_as_it_is_told(tmp_path: Path) -> None:
    control = tmp_path / "judge"

    def score(truth: str, said: str) -> float:
        return judge.score("", said, truth, control=str(control))

    assert (score("4", "4"), score("4", "5")) == (1.0, 0.0)
    control.write_text("raise")
    assert score("5", "5") == 1.0, "one in four"
    with pytest.raises(RuntimeError, match="told to raise"):
        score("4", "4")
