# SPDX-License-Identifier: Apache-2.0
"""A mood lasts until one has misbehaved, and a complaint ends the soak."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from recipe.async_pipeline.lab.soak import judge, misbehaviour
from recipe.async_pipeline.lab.soak.job import SoakFailed, control_of
from recipe.async_pipeline.lab.soak.misbehaviour import COMPLAINT, misbehave
from tests.fakes.soak_run import Run


@pytest.fixture
def control(job: Run, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(misbehaviour, "POLL_S", 0.0)
    monkeypatch.setattr(misbehaviour, "MISBEHAVE_S", 0.0)
    return control_of(job.folder)


def when_polled(monkeypatch: pytest.MonkeyPatch, control: Path) -> list[str]:
    """Have the reward function judge a response at each poll; return the moods that it found."""
    found: list[str] = []

    def sleep(_: float) -> None:
        found.append(control.read_text())
        if len(found) == 2:
            with pytest.raises(RuntimeError, match="requests an exception"):
                judge.score("", "4", "4", control=str(control))

    monkeypatch.setattr(time, "sleep", sleep)
    return found


def test_a_mood_lasts_until_one_has_misbehaved(
    job: Run, control: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):  # what misbehaved in the fault before does not count
        found = when_polled(monkeypatch, control)
        misbehave("raise")(job)
        assert found == ["raise", "raise"]
        assert not control.exists()


def test_a_mood_in_which_nothing_misbehaves_is_an_error(
    job: Run, control: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(misbehaviour, "FIRST_S", -1.0)
    with pytest.raises(TimeoutError, match="in which nothing misbehaved"):
        misbehave("hang")(job)
    assert not control.exists(), "nothing misbehaves later"


def test_a_run_that_ends_meanwhile_is_noticed(job: Run, control: Path) -> None:
    job.dead = True
    with pytest.raises(SoakFailed, match="it ended"):
        misbehave("hang")(job)


def test_a_complaint_ends_the_soak(job: Run, control: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    when_polled(monkeypatch, control)
    Path(f"{control}{COMPLAINT}").write_text("another answer")
    with pytest.raises(SoakFailed, match="another answer"):
        misbehave("raise")(job)


def test_a_mood_may_last_for_some_versions(job: Run, control: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    when_polled(monkeypatch, control)
    monkeypatch.setattr(misbehaviour, "FIRST_S", 0.1)
    with pytest.raises(TimeoutError, match="without 2 versions during raise"):
        misbehave("raise", versions=2)(job)
    assert not control.exists()
