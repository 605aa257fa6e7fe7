# SPDX-License-Identifier: Apache-2.0
"""The order of the faults, and the report."""

from __future__ import annotations

import json
import signal
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.async_pipeline.errors import ConfigError
from recipe.async_pipeline.lab.cli import soak
from recipe.async_pipeline.lab.soak import faults, nemesis
from tests.fakes.soak_run import record


@given(seed=st.integers(), kinds=st.sets(st.sampled_from(sorted(faults.FAULTS)), min_size=1))
def test_every_kind_is_dealt_once_per_round(seed: int, kinds: set[str]) -> None:
    cards = list(islice(nemesis.deck(seed, sorted(kinds)), 3 * len(kinds)))
    for i in range(3):
        assert set(cards[i * len(kinds) : (i + 1) * len(kinds)]) == kinds
    assert cards == list(islice(nemesis.deck(seed, sorted(kinds)), 3 * len(kinds))), (
        "the seed determines the order"
    )
    if len(kinds) > 1:
        assert all(a != b for a, b in zip(cards, cards[1:], strict=False))


@pytest.mark.parametrize(
    ("seconds", "kinds", "faults"), [(490, 11, 11), (60, 11, 11), (3600, 11, 77), (490, 1, 11), (-1, 3, 3)]
)
def test_faults_within_gives_whole_rounds(seconds: float, kinds: int, faults: int) -> None:
    assert nemesis.faults_within(seconds, kinds) == faults


def outcome() -> nemesis.SoakOutcome:
    return nemesis.SoakOutcome(
        struck=[
            nemesis.Struck("kill_engine", 20.0, 30.0),
            nemesis.Struck("burst", 60.0, 4.0),
            nemesis.Struck("kill_engine", 90.0),
        ],
        hangs=["the run did not recover after kill_engine: TimeoutError"],
        off=["a tracker is switched off after an error"],
        quiet_steps=20,
        quiet_s=40.0,
        steps=30,
        seconds=100.0,
    )


def test_a_run_that_hangs_before_it_has_a_ledger_is_a_violation(tmp_path: Path) -> None:
    hung = nemesis.SoakOutcome(hangs=["the run did not recover: 600 s without the first version served"])
    found = nemesis.report(hung, tmp_path, ["burst"])
    assert found["violations"] == hung.hangs
    assert (found["steps"], found["not_injected"]) == (0, ["burst"])
    with pytest.raises(ConfigError, match="ledger.jsonl does not exist"):
        nemesis.report(nemesis.SoakOutcome(), tmp_path, ["burst"])


def test_the_report_counts_faults_recoveries_steps_and_fates(tmp_path: Path) -> None:
    (tmp_path / "ledger.jsonl").write_text("")
    (tmp_path / "events.1.jsonl").write_text(
        json.dumps(record("SERVED", version=1, replicas=1)) + '\n{"t": 2.0, "ro'
    )
    found = nemesis.report(outcome(), tmp_path, ["burst", "kill_run", "kill_engine"])
    assert found["faults_injected"] == {"burst": 1, "kill_engine": 2}
    assert found["not_injected"] == ["kill_run"]
    assert (found["recovered"], found["recovery_s"]) == (2, {"median": 17.0, "max": 30.0})
    assert found["recovery_s_by_fault"] == {"burst": [4.0], "kill_engine": [30.0]}
    assert found["goodput_ratio"] == pytest.approx(0.6)
    assert found["violations"][1] == "a tracker is switched off after an error"
    assert found["violations"][0] == "the run did not recover after kill_engine: TimeoutError"
    assert "events.1.jsonl: version 1 is served, and was never gathered" in found["violations"]
    assert set(found["samples"]) == {"dispatched", "trained", "filtered", "expired", "failed", "in_flight"}
    lines = soak.in_words(found)
    assert lines[0] == "faults       3 (burst 1, kill_engine 2); recovered from 2"
    assert "not tried    kill_run: the time was up; increase --minutes" in lines
    assert any(line.startswith("VIOLATION    the run did not recover") for line in lines)


@pytest.mark.parametrize(("minutes", "faults"), [(10, 11), (4, 4), (1, 1)])
def test_room_for_leaves_the_quiet_time_out(minutes: float, faults: int) -> None:
    assert nemesis.room_for(60 * minutes) == faults


class QuietJob:
    """A run that makes one step per second and suffers no damage."""

    def __init__(self, clock: list[float]) -> None:
        self.clock = clock

    def start(self) -> None: ...

    def wait_for(self, what: str, done: object, seconds: float, since: int) -> None: ...

    def now(self) -> int:
        return 0

    def newest_version(self) -> int:
        return int(self.clock[0])

    def check_alive(self) -> None: ...

    def switched_off(self) -> list[str]:
        return []

    def end(self, number: signal.Signals) -> None: ...

    def kill(self) -> None: ...


@pytest.mark.parametrize("recovery_s", [1.0, 30.0, 200.0])
def test_faults_are_spread_over_the_time(recovery_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    at: list[float] = []

    def pass_s(seconds: float) -> None:
        clock[0] += seconds

    def strike(job: object, fault: object, limit_s: float) -> float:
        at.append(clock[0])
        pass_s(recovery_s)
        return recovery_s

    monkeypatch.setattr(nemesis, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=pass_s))
    monkeypatch.setattr(nemesis, "strike", strike)
    kinds = sorted(kind for kind, fault in faults.FAULTS.items() if fault.task in (None, "addition"))
    found = nemesis.soak(cast("Any", QuietJob(clock)), kinds, 1000.0, 1, lambda line: None)
    assert found.hangs == []
    if recovery_s < 40:
        assert sorted(one.kind for one in found.struck) == kinds, "each kind once"
        assert clock[0] == pytest.approx(1000.0)
        assert max(b - a for a, b in zip(at, at[1:], strict=False)) < 60
        assert found.steps == pytest.approx(850, abs=1)
    assert min(b - a - recovery_s for a, b in zip(at, at[1:], strict=False)) >= nemesis.GAP_S[0]


class SlowJob(QuietJob):
    """A run that makes one step in a hundred seconds."""

    def wait_for(self, what: str, done: object, seconds: float, since: int) -> None:
        self.clock[0] = 100.0 * (self.clock[0] // 100 + 1)

    def newest_version(self) -> int:
        return int(self.clock[0] // 100)


def test_a_slow_run_gets_a_fault_and_time_to_recover(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, limits = [0.0], list[float]()

    def pass_s(seconds: float) -> None:
        clock[0] += seconds

    def strike(job: object, fault: object, limit_s: float) -> float:
        limits.append(limit_s)
        return 1.0

    monkeypatch.setattr(nemesis, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=pass_s))
    monkeypatch.setattr(nemesis, "strike", strike)
    found = nemesis.soak(cast("Any", SlowJob(clock)), ["burst"], 60.0, 1, lambda line: None)
    assert (found.hangs, found.quiet_steps, len(found.struck)) == ([], 1, 1)
    assert limits == [pytest.approx(100.0 * nemesis.RECOVERY_STEPS, rel=0.01)]
