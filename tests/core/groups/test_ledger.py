# SPDX-License-Identifier: Apache-2.0
"""Every prompt that was drawn has one fate in the end, and the account of it does not grow with the run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from recipe.async_pipeline.core.groups.fates import FateRegister
from recipe.async_pipeline.core.groups.items import Group, Trajectory, plain
from recipe.async_pipeline.core.groups.ledger import Ledger
from recipe.async_pipeline.errors import ConservationError
from recipe.async_pipeline.tools.ledger.audit import audit


def group(uid: str, *versions: int, reward: float | None = 0.5) -> Group:
    answers = (
        Trajectory(
            key=f"{uid}_{i}",
            first_version=v,
            last_version=v,
            num_tokens=3,
            spans=plain(((v, 0),)),
            reward=reward,
        )
        for i, v in enumerate(versions or (0, 0))
    )
    return Group(uid=uid, step=1, trajectories=tuple(answers))


def kept(ledger: Ledger) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    ledger.subscribe(lambda record: records.append(record.as_dict()))
    return records


def drawn(*uids: str) -> tuple[FateRegister, Ledger]:
    fates = FateRegister()
    ledger = Ledger(fates, max_lag=1, last_step=9)
    for uid in uids:
        ledger.draw(uid, 1, 0)
    return fates, ledger


def test_what_does_not_balance_is_rejected() -> None:
    fates, ledger = drawn("a", "c")
    with pytest.raises(ConservationError, match="a was drawn twice"):
        ledger.draw("a", 1, 0)
    ledger.finish(group("a"))
    with pytest.raises(ConservationError, match="a is finished, but was finished before"):
        ledger.finish(group("a"))
    fates.train(1, [group("a")])
    attempts: tuple[Callable[[], object], ...] = (
        lambda: ledger.finish(group("a")),
        lambda: ledger.generate_again("a", "stale", 0),
    )
    for again in attempts:
        with pytest.raises(ConservationError, match="prompt a is .*, but is not in flight"):
            again()


def test_a_step_that_is_reported_twice_is_one_record() -> None:
    fates, ledger = drawn("a", "b", "c")
    records = kept(ledger)
    for _ in range(2):
        fates.train(1, [group("a"), group("b")])
    assert ledger.trajectories_trained == 4
    assert [record["kind"] for record in records] == ["trained"]


def test_records_tell_everything_and_have_no_gap() -> None:
    fates = FateRegister()
    ledger = Ledger(fates, max_lag=1, last_step=2, facts={"run": "r"})
    records = kept(ledger)
    ledger.open()
    ledger.serve(0)
    for uid in "abc":
        ledger.draw(uid, 1, 0)
    ledger.generate_again("a", "stale", 0)
    ledger.finish(group("a", 0, 1))
    ledger.score(group("a", reward=0.25))
    fates.settle("b", "expired", why="it held a step up")
    fates.train(1, [group("a", 0, 0)])
    ledger.checkpointed(1, 11)
    ledger.close("failed")
    assert [record["n"] for record in records] == list(range(1, len(records) + 1))
    assert records[0] == {"n": 1, "kind": "opened", "step": 0, "max_lag": 1, "last_step": 2, "run": "r"}
    assert records[5] == {"n": 6, "kind": "again", "uid": "a", "why": "stale", "version": 0, "kept_tokens": 0}
    assert records[6]["trajectories"][1] == {
        "key": "a_1",
        "first": 1,
        "last": 1,
        "tokens": 3,
        "spans": [[1, 0]],
        "reward": 0.5,
    }
    assert records[7] == {"n": 8, "kind": "scored", "uid": "a", "rewards": [0.25, 0.25]}
    assert records[8] == {"n": 9, "kind": "expired", "uid": "b", "why": "it held a step up"}
    assert records[9] == {
        "n": 10,
        "kind": "trained",
        "step": 1,
        "uids": ["a"],
        "trajectories": 2,
        "lag_max": 0,
    }
    assert records[11] == {
        "n": 12,
        "kind": "closed",
        "status": "failed",
        "step": 1,
        "drawn": 3,
        "in_flight": 1,
        "trained": 1,
        "filtered": 0,
        "expired": 1,
        "failed": 0,
    }


def test_what_is_kept_in_memory_does_not_grow_with_the_run() -> None:
    def size_after(steps: int) -> int:
        fates, ledger = drawn()
        for step in range(1, steps + 1):
            groups = [group(f"{step}.{i}", step - 1) for i in range(4)]
            for one in groups:
                ledger.draw(one.uid, step, step - 1)
                ledger.finish(one)
            fates.train(step, groups)
        return sum(sys.getsizeof(value) for value in (*vars(ledger).values(), *vars(fates).values()))

    assert size_after(500) <= 1.1 * size_after(10)


def test_an_account_continues_from_its_state() -> None:
    fates, before = drawn(*"abcd")
    before.finish(group("b"))
    fates.train(1, [group("a")])
    state = before.state()
    fates = FateRegister(first_step=2)
    after = Ledger(fates, max_lag=1, last_step=9)
    after.restore(state, {"b"})
    records = kept(after)
    after.open()
    assert records == [
        {
            "n": state.number + 1,
            "kind": "resumed",
            "step": 1,
            "in_flight": ["b", "c", "d"],
            "drawn": 4,
            "trained": 1,
            "filtered": 0,
            "expired": 0,
            "failed": 0,
            "regenerated": 0,
            "max_lag": 1,
            "last_step": 9,
        }
    ]
    with pytest.raises(ConservationError, match="b is finished, but was finished before"):
        after.finish(group("b"))
    after.finish(group("c"))
    fates.train(2, [group("b"), group("c")])
    fates.check({"d"})


def test_an_episode_records_its_end_and_attempts_unless_they_are_usual() -> None:
    fates, ledger = drawn("a")
    records = kept(ledger)
    first, second = group("a").trajectories
    trajectories = (replace(first, turns=1), replace(second, attempts=3, end="turns", turns=8))
    ledger.finish(Group(uid="a", step=1, trajectories=trajectories, redundant=2))
    assert [one.get("attempts") for one in records[0]["trajectories"]] == [None, 3]
    assert [one.get("end") for one in records[0]["trajectories"]] == [None, "turns"]
    assert [one.get("turns") for one in records[0]["trajectories"]] == [None, 8]
    audited = audit(
        [
            {"n": 1, "kind": "opened", "step": 0, "max_lag": 1, "last_step": 1},
            DISPATCHED,
            {**records[0], "n": 3},
        ]
    )
    assert (audited.episodes_repeated, audited.ends, audited.violations) == (2, {"turns": 1}, [])
    assert audited.episodes_redundant == 2


def test_an_episode_with_several_conversations_is_counted_once() -> None:
    fates, ledger = drawn("a")
    records = kept(ledger)
    (one, *_) = group("a").trajectories
    rows = tuple(replace(one, key=f"a_{key}", attempts=2, end="tokens") for key in ("0_0", "0_1", "1_0"))
    ledger.finish(Group(uid="a", step=1, trajectories=rows))
    opened = {"n": 1, "kind": "opened", "step": 0, "max_lag": 1, "last_step": 1}
    audited = audit([opened, DISPATCHED, {**records[0], "n": 3}])
    assert (audited.episodes_repeated, audited.ends, audited.violations) == (2, {"tokens": 2}, [])


DISPATCHED = {"n": 2, "kind": "dispatched", "uid": "a", "step": 1, "version": 0}
