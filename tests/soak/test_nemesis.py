# SPDX-License-Identifier: Apache-2.0
"""Which fault comes next, and what is made of it all."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.async_pipeline.soak import command, faults, nemesis
from tests.soak import record


@given(seed=st.integers(), kinds=st.sets(st.sampled_from(sorted(faults.FAULTS)), min_size=1))
def test_every_kind_comes_once_before_any_comes_again(seed: int, kinds: set[str]) -> None:
    cards = list(islice(nemesis.deck(seed, sorted(kinds)), 3 * len(kinds)))
    for i in range(3):
        assert set(cards[i * len(kinds) : (i + 1) * len(kinds)]) == kinds
    assert cards == list(islice(nemesis.deck(seed, sorted(kinds)), 3 * len(kinds))), "the seed decides"
    if len(kinds) > 1:
        assert all(a != b for a, b in zip(cards, cards[1:], strict=False))


def outcome() -> nemesis.Outcome:
    return nemesis.Outcome(
        struck=[nemesis.Struck("kill_engine", 20.0, 30.0), nemesis.Struck("burst", 60.0, 4.0), nemesis.Struck("kill_engine", 90.0)],
        hangs=["the run did not recover after kill_engine: TimeoutError"],
        quiet_steps=20,
        quiet_s=40.0,
        steps=30,
        seconds=100.0,
    )


def test_the_outcome_counts_faults_recoveries_steps_and_fates(tmp_path: Path) -> None:
    (tmp_path / "ledger.jsonl").write_text("")
    (tmp_path / "events.1.jsonl").write_text(json.dumps(record("SERVED", version=1, replicas=1)) + '\n{"t": 2.0, "ro')
    found = nemesis.report(outcome(), tmp_path)
    assert found["faults_injected"] == {"burst": 1, "kill_engine": 2}
    assert (found["recovered"], found["recovery_s"]) == (2, {"median": 17.0, "max": 30.0})
    assert found["recovery_s_by_fault"] == {"burst": [4.0], "kill_engine": [30.0]}
    assert found["goodput_ratio"] == pytest.approx(0.6)
    assert found["violations"][0] == "the run did not recover after kill_engine: TimeoutError"
    assert "events.1.jsonl: version 1 is served, and was never gathered" in found["violations"]
    assert set(found["samples"]) == {"dispatched", "trained", "filtered", "expired", "failed", "in_flight"}
    lines = command.in_words(found)
    assert lines[0] == "faults       3 (burst 1, kill_engine 2); recovered from 2"
    assert any(line.startswith("VIOLATION    the run did not recover") for line in lines)
