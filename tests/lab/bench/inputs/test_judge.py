# SPDX-License-Identifier: Apache-2.0
"""A judge waits for the seeded latency, writes its span, and scores: the last line, or as the task does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from recipe.async_pipeline.lab.bench.inputs import image_judge, judge
from recipe.async_pipeline.lab.bench.inputs.waits import LognormalWait
from recipe.async_pipeline.lab.bench.measuring import spans
from recipe.async_pipeline.lab.bench.measuring.spans import SPANS_DIR, read_spans

WAIT = {"median": 5.0, "sigma": 0.5, "cap": 20.0}


@pytest.fixture(autouse=True)
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    spans.of_this_job.cache_clear()
    monkeypatch.setenv(SPANS_DIR, str(tmp_path))
    return tmp_path


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that judges wait for, in no time."""
    seconds: list[float] = []

    async def sleep(delay_s: float) -> None:
        seconds.append(delay_s)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return seconds


def of_text(answer: str, session: int = 0) -> object:
    extra = {"index": 3, "session": session}
    return asyncio.run(judge.compute_score("toy", answer, "46", extra, seed=1, wait=WAIT))


def of_picture(session: int) -> object:
    picture = np.zeros((3, 16, 16), np.uint8)
    picture[1, :8, :8] = 200
    extra = {"index": 3, "session": session}
    return asyncio.run(
        image_judge.compute_score("image", picture, "green top right", extra, seed=1, wait=WAIT)
    )


def test_the_last_line_is_scored() -> None:
    assert of_text("46") == of_text("9\n12\n46") == 1.0
    assert of_text("46\n9") == of_text("") == 0.0


def test_a_picture_is_scored_as_the_task_does() -> None:
    assert of_picture(0) == {"score": 0.5, "colour": 1.0, "place": 0.0}


@pytest.mark.parametrize("score", [lambda session: of_text("46", session), of_picture])
def test_each_response_has_its_latency_in_any_order(
    job: Path, waits: list[float], score: Callable[[int], object]
) -> None:
    for session in (2, 0, 1):
        score(session)
    assert waits == [LognormalWait(**WAIT).draw(1, "judge", 3, i) for i in (2, 0, 1)]
    assert [one.facts for one in read_spans(job) if one.name == "judge"] == [{"prompt": 3}] * 3
