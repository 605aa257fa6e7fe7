# SPDX-License-Identifier: Apache-2.0
"""Every prompt that was drawn has one fate in the end, and the account of it does not grow with the run."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from recipe.async_pipeline.core.items import Group, Trajectory
from recipe.async_pipeline.core.ledger import Ledger
from recipe.async_pipeline.errors import ConservationError


def group(uid: str, *versions: int, reward: float | None = 0.5) -> Group:
    answers = (
        Trajectory(
            key=f"{uid}_{i}", first_version=v, last_version=v, num_tokens=3, spans=((v, 0),), reward=reward
        )
        for i, v in enumerate(versions or (0, 0))
    )
    return Group(uid=uid, step=1, trajectories=tuple(answers))


def kept(ledger: Ledger) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    ledger.subscribe(lambda record: records.append(record.as_dict()))
    return records


def drawn(*uids: str) -> Ledger:
    ledger = Ledger(max_lag=1, last_step=9)
    for uid in uids:
        ledger.draw(uid, 1, 0)
    return ledger


def test_what_does_not_balance_is_rejected() -> None:
    ledger = drawn("a", "c")
    with pytest.raises(ConservationError, match="a was drawn twice"):
        ledger.draw("a", 1, 0)
    with pytest.raises(ConservationError, match="prompt b is trained in step 1, but is not in flight"):
        ledger.commit(1, [group("b")])
    with pytest.raises(ConservationError, match="2 prompts were lost, e.g. \\['a', 'c'\\]"):
        ledger.check(())
    ledger.finish(group("a"))
    with pytest.raises(ConservationError, match="a is finished, but was finished before"):
        ledger.finish(group("a"))
    with pytest.raises(ConservationError, match="step 1 holds a group twice: a"):
        ledger.commit(1, [group("a"), group("a")])
    ledger.commit(1, [group("a")])
    with pytest.raises(ConservationError, match="prompt a is trained in step 2"):
        ledger.commit(2, [group("a")])
    with pytest.raises(ConservationError, match="prompt a is failed"):
        ledger.give_up("a", "failed")
    with pytest.raises(ConservationError, match="1 have a fate and are still about, e.g. \\['a'\\]"):
        ledger.check({"a", "c"})
    ledger.check({"c"})


def test_a_commit_may_be_repeated_and_counts_once() -> None:
    ledger = drawn("a", "b", "c")
    records = kept(ledger)
    for _ in range(2):
        ledger.commit(1, [group("a"), group("b")])
    assert (ledger.step, ledger.count("trained"), ledger.trajectories_trained) == (1, 2, 4)
    assert [record["kind"] for record in records] == ["trained"]
    with pytest.raises(ConservationError, match="step 1 cannot be committed after step 1"):
        ledger.commit(1, [group("c")])
    with pytest.raises(ConservationError, match="step 3 cannot be committed after step 1"):
        ledger.commit(3, [group("c")])


def test_records_tell_everything_and_have_no_gap() -> None:
    ledger = Ledger(max_lag=1, last_step=2, facts={"run": "r"})
    records = kept(ledger)
    ledger.open()
    ledger.serve(0)
    for uid in "abc":
        ledger.draw(uid, 1, 0)
    ledger.answer_again("a", "stale", 0)
    ledger.finish(group("a", 0, 1))
    ledger.score(group("a", reward=0.25))
    ledger.give_up("b", "expired", "it held a step up")
    ledger.commit(1, [group("a", 0, 0)])
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


def test_fates_are_counted() -> None:
    ledger = drawn(*"abcd")
    for uid, fate in (("a", "filtered"), ("b", "expired"), ("c", "expired")):
        ledger.give_up(uid, fate)  # type: ignore[arg-type]
    assert [ledger.count(fate) for fate in ("filtered", "expired", "failed", "trained")] == [1, 2, 0, 0]  # type: ignore[arg-type]
    assert (ledger.drawn, ledger.settled, list(ledger.in_flight)) == (4, 3, ["d"])


def test_what_is_kept_in_memory_does_not_grow_with_the_run() -> None:
    def size_after(steps: int) -> int:
        ledger = drawn()
        for step in range(1, steps + 1):
            groups = [group(f"{step}.{i}", step - 1) for i in range(4)]
            for one in groups:
                ledger.draw(one.uid, step, step - 1)
                ledger.finish(one)
            ledger.commit(step, groups)
        return sum(sys.getsizeof(value) for value in vars(ledger).values())

    assert size_after(500) <= 1.1 * size_after(10)


def test_an_account_goes_on_from_its_state() -> None:
    before = drawn(*"abcd")
    before.finish(group("b"))
    before.commit(1, [group("a")])
    state = before.state()
    after = Ledger(max_lag=1, last_step=9, first_step=2)
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
    after.commit(2, [group("b"), group("c")])
    after.check({"d"})
