# SPDX-License-Identifier: Apache-2.0
"""An auditor believes no sums: each way in which a ledger can be wrong is found in its records."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from recipe.async_pipeline.tools.ledger.audit import Audit, audit, horizon, valid
from tests.fakes.ledgers import at, changed, renumbered, resumed, trained_again, whole
from tests.fakes.lives import Records


def test_a_whole_run_has_no_violation() -> None:
    found = audit(whole())
    assert found.violations == [] and found.ok
    assert (found.status, found.steps, found.trained, found.filtered, found.expired) == (
        "completed",
        4,
        8,
        1,
        1,
    )
    assert (found.dispatched, found.in_flight, found.trajectories_trained, found.lag_max) == (10, 0, 16, 1)


def test_a_run_that_was_killed_has_prompts_in_flight_and_no_violation() -> None:
    records = whole()
    found = audit(records[: at(records, "trained", 1)])
    assert (found.ok, found.status, found.steps) == (True, "running", 1)
    assert found.in_flight == found.dispatched - found.trained - found.filtered - found.expired > 0


def without(kind: str, number: int = 0) -> Callable[[Records], Records]:
    return lambda records: renumbered([r for i, r in enumerate(records) if i != at(records, kind, number)])


def twice(kind: str, number: int = 0) -> Callable[[Records], Records]:
    def repeat(records: Records) -> Records:
        place = at(records, kind, number)
        return renumbered([*records[: place + 1], records[place], *records[place + 1 :]])

    return repeat


def fewer_answers(records: Records) -> Records:
    """A group of the second step lost one between its end and the step."""
    uid = records[at(records, "trained", 1)]["uids"][0]
    return [
        {**r, "trajectories": r["trajectories"][1:]} if r["kind"] == "finished" and r["uid"] == uid else r
        for r in records
    ]


def too_old(records: Records) -> Records:
    uid = records[at(records, "trained", 3)]["uids"][0]
    return [
        {**r, "trajectories": [{**one, "first": 0} for one in r["trajectories"]]}
        if r["kind"] == "finished" and r["uid"] == uid
        else r
        for r in records
    ]


def all_masked(records: Records) -> Records:
    """All trajectories of a prompt are marked as older than what its step may train."""
    place = at(records, "trained", 1)
    uid = records[place]["uids"][0]
    finished = next(r for r in records if r["kind"] == "finished" and r["uid"] == uid)
    masks = {one["key"]: 99 for one in finished["trajectories"]}
    return [{**r, "masked_before": masks} if i == place else r for i, r in enumerate(records)]


@pytest.mark.parametrize(
    ("spoil", "violation"),
    [
        (without("dispatched", 3), "was never dispatched"),
        (twice("dispatched"), "was dispatched twice"),
        (without("filtered"), "the run completed with 1 prompts in flight"),
        (twice("filtered"), "is filtered, but was filtered before"),
        (without("finished"), "was not finished"),
        (twice("finished"), "was finished twice"),
        (trained_again, "is trained in step 2, but was trained before"),
        (too_old, "has lag 3 in step 4; from 0 to 1 is allowed"),
        (without("trained", 1), "step 3 was committed after step 1"),
        (twice("served", 1), "version 1 was served after version 1"),
        (changed("served", 0, version=3), "version 3 was served before step 3 was trained"),
        (lambda records: records[:5] + records[6:], "the records between them are missing"),
        (changed("dispatched", 2, kind="guessed"), "a record that no ledger has"),
        (changed("trained", 0, uids=None), "is not complete: TypeError"),
        (changed("closed", 0, drawn=99), "the run counts 99 prompts"),
        (lambda records: [], "the ledger has no whole record"),
        (lambda records: records[:5] + records[4:], "(dispatched) follows record 5: it comes twice"),
        (lambda records: records[:5] + records[3:], "follows record 5: out of order"),
        (fewer_answers, "step 2 counts 4 trajectories, its prompts have 3"),
        (changed("trained", 1, trajectories=3), "step 2 counts 3 trajectories, its prompts have 4"),
        (changed("closed", 0, failed=1), "the run counts 1 prompts failed, its ledger 0"),
        (
            changed("closed", 0, status="great"),
            "the run ended as 'great'; it can be completed, interrupted, failed",
        ),
        (changed("trained", 1, step=float("inf")), "is not complete: OverflowError"),
        (changed("finished", 0, trajectories=["x"]), "is not complete: TypeError"),
        (all_masked, "was trained in step 2 with every token masked"),
        (twice("opened"), "opens a ledger that was open"),
    ],
)
def test_what_is_wrong_is_found(spoil: Callable[[Records], Records], violation: str) -> None:
    found = audit(spoil(whole()))
    assert not found.ok
    assert any(violation in text for text in found.violations), found.violations


def test_many_violations_are_counted_but_not_all_kept() -> None:
    found = audit([{"n": n, "kind": "guessed"} for n in range(100)])
    assert (found.num_violations, len(found.violations)) == (101, 21)


def test_what_a_resumed_run_makes_void_does_not_count() -> None:
    before, after = resumed()
    records = [*before, *after]
    assert audit(records).violations, "if all counted"
    counting = list(valid(records))
    assert len(counting) == after[0]["n"] - 1 + len(after)
    found = audit(counting)
    assert (found.violations, found.processes, found.trained) == ([], 2, 18)


def test_a_ledger_that_begins_with_a_resumption_stands_for_itself() -> None:
    _, after = resumed()
    found = audit(after)
    assert (found.violations, found.processes, found.trained, found.steps) == ([], 1, 18, 6)


def test_a_resumption_that_does_not_fit_is_found() -> None:
    before, after = resumed()
    lost = after[0]["in_flight"][1:]
    found = audit(valid([*before, {**after[0], "in_flight": lost}, *after[1:]]))
    assert any("1 prompts are in flight only before or after step" in text for text in found.violations)
    found = audit(valid([*before, {**after[0], "step": 1}, *after[1:]]))
    assert any("the run was resumed after step 1, but step" in text for text in found.violations)


def test_a_record_counts_unless_a_later_process_began_before_it() -> None:
    counts = horizon([(5, 4), (9, 2)])
    assert [
        counts(place, number) for place, number in ((0, 1), (1, 2), (4, 5), (5, 4), (8, 1), (9, 2), (10, 3))
    ] == [
        True,
        False,
        False,
        False,
        True,
        True,
        True,
    ]


def test_as_json() -> None:
    found = Audit(violations=["x"], num_violations=1).as_dict()
    assert (found["ok"], found["violations"], found["in_flight"]) == (False, ["x"], 0)
