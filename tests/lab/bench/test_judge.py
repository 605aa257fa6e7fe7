# SPDX-License-Identifier: Apache-2.0
"""The judge waits for the seeded latency, writes its span and scores the last line."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from recipe.async_pipeline.core.clock import run_virtual
from recipe.async_pipeline.lab.bench import judge, spans
from recipe.async_pipeline.lab.bench.spans import SPANS_DIR, read_spans
from recipe.async_pipeline.lab.bench.waits import LognormalWait

WAIT = {"median": 5.0, "sigma": 0.5, "cap": 20.0}


def score(answer: str, session: int = 0) -> float:
    extra = {"index": 3, "session": session}
    return run_virtual(judge.compute_score("toy", answer, "46", extra, seed=1, wait=WAIT))


@pytest.fixture(autouse=True)
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    spans.of_this_job.cache_clear()
    monkeypatch.setenv(SPANS_DIR, str(tmp_path))
    return tmp_path


def test_the_last_line_is_scored() -> None:
    assert score("46") == score("9\n12\n46") == 1.0
    assert score("46\n9") == score("") == 0.0


def test_each_response_has_its_latency_in_any_order(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    for session in (2, 0, 1):
        score("46", session)
    assert waits == [LognormalWait(**WAIT).draw(1, "judge", 3, i) for i in (2, 0, 1)]
    assert [s.facts for s in read_spans(job) if s.name == "judge"] == [{"prompt": 3}] * 3
