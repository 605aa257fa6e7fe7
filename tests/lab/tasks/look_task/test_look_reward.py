# SPDX-License-Identifier: Apache-2.0
"""A point for the whole answer; its words are also reported by themselves."""

from __future__ import annotations

import pytest

from recipe.async_pipeline.lab.tasks.look_task.look_reward import compute_score


@pytest.mark.parametrize(
    ("said", "score", "words"),
    [
        ("2 red box", 1.0, (1.0, 1.0, 1.0)),
        ("2 red disc", 0.0, (1.0, 1.0, 0.0)),
        ("3 blue box", 0.0, (0.0, 0.0, 1.0)),
        ("2 red", 0.0, (0.0, 0.0, 0.0)),
        ("2 red box box", 0.0, (0.0, 0.0, 0.0)),
        ("2  red box", 0.0, (0.0, 0.0, 0.0)),
        ("", 0.0, (0.0, 0.0, 0.0)),
    ],
)
def test_only_the_whole_answer_scores(said: str, score: float, words: tuple[float, ...]) -> None:
    found = compute_score("look", said, "2 red box", {"index": 1})
    assert found == dict(zip(("score", "count", "colour", "shape"), (score, *words), strict=True))
