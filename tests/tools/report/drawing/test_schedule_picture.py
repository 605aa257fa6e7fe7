# SPDX-License-Identifier: Apache-2.0
"""The picture of several runs shows the same number of seconds of the steady state of each run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from recipe.async_pipeline.core.events import LogRecord
from recipe.async_pipeline.errors import ConfigError, RunFilesError
from recipe.async_pipeline.tools.report.drawing.schedule_picture import (
    Window,
    common_seconds,
    draw,
    window_of,
)
from recipe.async_pipeline.tools.report.figures.run_reader import RunFiles

STEP_S = 10.0


def record(t: float, role: str, event: str, **fields: Any) -> LogRecord:
    return LogRecord(t=t, role=role, event=event, state="RUNNING", fields=fields)


def synchronous(steps: int) -> RunFiles:
    """Return a run whose steps have prompts of 4 s and 6 s, 1 s of log-probs, 2 s of training, 1 s idle."""
    pools = {"train": {"roles": ["logp", "train", "param_update"]}, "generate": {"roles": ["generate"]}}
    events = [record(0.0, "flow", "START", max_lag=0, pools=pools)]
    for step in range(1, steps + 1):
        start = (step - 1) * STEP_S
        keys = [f"{step}a", f"{step}b"]
        events += [
            record(start + 4, "generate", "ANSWERED", key=keys[0], seconds=4.0),
            record(start + 6, "generate", "ANSWERED", key=keys[1], seconds=6.0),
            record(start + 6, "rollout", "ASSEMBLED", step=step, keys=keys),
            record(start + 6, "logp", "LEASE", step=step),
            record(start + 7, "logp", "RELEASE", step=step, pool="train"),
            record(start + 7, "train", "LEASE", step=step),
            record(start + 9, "train", "TRAINED", step=step),
            record(start + 9, "train", "RELEASE", step=step, pool="train"),
            record(start + 10, "param_update", "SERVED", step=step, version=step),
        ]
    return RunFiles(path=Path("runs/a"), events=events, summary={"strategy": "on_policy"})


def spans(slices: Sequence[Any]) -> list[tuple[float, float, int]]:
    return [(round(s.start, 6), round(s.end, 6), s.step) for s in slices]


def test_window_of_reads_the_steady_state() -> None:
    window = window_of(synchronous(10), 20.0)
    # It begins when step 3 of 10 has ended, at 29 s.
    assert (window.name, window.max_lag, window.steps, window.lanes) == ("on_policy", 0, 2, 2)
    assert spans(window.training) == [(7, 8, 4), (8, 10, 4), (17, 18, 5), (18, 20, 5)]
    assert [s.pale for s in window.training] == [True, False, True, False]
    assert window.updates == [1.0, 11.0]
    assert window.idle == pytest.approx(1 - 6 / 20)


def test_prompts_are_clipped_and_the_longest_comes_first() -> None:
    window = window_of(synchronous(10), 8.0)
    assert spans(window.prompts) == [(1, 7, 4), (1, 5, 4)]
    assert [s.lane for s in window.prompts] == [0, 1]
    assert spans(window_of(synchronous(10), 4.0).prompts) == [(1, 4, 4), (1, 4, 4)]


def test_prompts_without_a_step_are_left_out() -> None:
    run = synchronous(10)
    dropped = record(52.0, "generate", "ANSWERED", key="dropped", seconds=2.0)
    with_one_more = RunFiles(path=run.path, events=[*run.events, dropped])
    assert window_of(with_one_more, 20.0).lanes == 2


def test_seconds_follow_the_slowest_run() -> None:
    assert common_seconds([synchronous(10)]) == pytest.approx(2.5 * STEP_S)


def test_a_run_that_is_too_short_is_rejected() -> None:
    with pytest.raises(RunFilesError, match="runs/a must have at least 6 steps .* got 5"):
        common_seconds([synchronous(5)])


def test_a_log_without_its_start_is_rejected() -> None:
    run = synchronous(10)
    with pytest.raises(RunFilesError, match="has no start of a pipeline"):
        window_of(RunFiles(path=run.path, events=run.events[1:]), 20.0)


def windows() -> list[Window]:
    return [window_of(synchronous(10), 20.0)]


@pytest.mark.parametrize(("name", "begins"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml")])
def test_the_format_follows_the_name(tmp_path: Path, name: str, begins: bytes) -> None:
    pytest.importorskip("matplotlib")
    draw(windows(), tmp_path / "made" / name)
    assert (tmp_path / "made" / name).read_bytes().startswith(begins)


def test_without_matplotlib_draw_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        draw(windows(), tmp_path / "a.png")
