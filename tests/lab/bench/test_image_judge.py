# SPDX-License-Identifier: Apache-2.0
"""The judge of pictures waits for the seeded latency, writes its span and scores as the task does."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from recipe.async_pipeline.lab.bench import image_judge, spans
from recipe.async_pipeline.lab.bench.spans import SPANS_DIR, read_spans
from recipe.async_pipeline.lab.bench.waits import LognormalWait

WAIT = {"median": 5.0, "sigma": 0.5, "cap": 20.0}


@pytest.fixture(autouse=True)
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    spans.of_this_job.cache_clear()
    monkeypatch.setenv(SPANS_DIR, str(tmp_path))
    return tmp_path


def test_each_picture_has_its_latency_and_its_score(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    picture = np.zeros((3, 16, 16), np.uint8)
    picture[1, :8, :8] = 200
    found = [
        asyncio.run(
            image_judge.compute_score(
                "image", picture, "green top right", {"index": 3, "session": session}, seed=1, wait=WAIT
            )
        )
        for session in (2, 0)
    ]
    assert found == [{"score": 0.5, "colour": 1.0, "place": 0.0}] * 2
    assert waits == [LognormalWait(**WAIT).draw(1, "judge", 3, session) for session in (2, 0)]
    assert [one.facts for one in read_spans(job) if one.name == "judge"] == [{"prompt": 3}] * 2
