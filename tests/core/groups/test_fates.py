# SPDX-License-Identifier: Apache-2.0
"""Every prompt that was drawn gets exactly one fate, and every subscriber learns of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest

from recipe.async_pipeline.core.groups.fates import FATES, Fate, FateRegister, NotTrained, Settlement
from recipe.async_pipeline.core.groups.items import Group
from recipe.async_pipeline.errors import ConservationError

SETTLE: dict[Fate, Callable[[FateRegister, str], None]] = {
    "trained": lambda fates, uid: fates.train(fates.step + 1, [group(uid)]),
    "filtered": lambda fates, uid: fates.settle(uid, "filtered", group=group(uid)),
    "expired": lambda fates, uid: fates.settle(uid, "expired", why="it held a step up"),
    "failed": lambda fates, uid: fates.settle(uid, "failed", why="empty_answer", group=group(uid)),
}


def group(uid: str) -> Group:
    return Group(uid=uid, step=1, trajectories=())


def drawn(*uids: str) -> FateRegister:
    fates = FateRegister()
    for uid in uids:
        fates.draw(uid)
    return fates


def told(fates: FateRegister) -> list[Settlement]:
    settlements: list[Settlement] = []
    fates.subscribe(settlements.append)
    return settlements


def test_the_table_of_this_test_is_complete() -> None:
    assert tuple(SETTLE) == FATES == ("trained", *get_args(NotTrained))


@pytest.mark.parametrize("fate", FATES)
def test_subscribers_learn_of_every_fate(fate: Fate) -> None:
    fates = drawn("a", "b")
    first, second = told(fates), told(fates)
    SETTLE[fate](fates, "a")
    assert first == second
    assert [(one.fate, one.uids) for one in first] == [(fate, ("a",))]
    assert [one.uid for one in first[0].groups] == ([] if fate == "expired" else ["a"])
    assert first[0].step == (1 if fate == "trained" else None)
    assert (fates.count(fate), fates.settled, list(fates.in_flight)) == (1, 1, ["b"])


@pytest.mark.parametrize("first", FATES)
@pytest.mark.parametrize("second", FATES)
def test_a_second_fate_is_refused_and_changes_nothing(first: Fate, second: Fate) -> None:
    fates = drawn("a", "b")
    SETTLE[first](fates, "a")
    before, settlements = fates.counts(), told(fates)
    with pytest.raises(
        ConservationError, match="prompt a is .*, but is not in flight: .* has a fate already"
    ):
        SETTLE[second](fates, "a")
    assert (fates.counts(), list(fates.in_flight), settlements) == (before, ["b"], [])
    assert fates.step == (first == "trained")


@pytest.mark.parametrize("fate", FATES)
def test_an_unknown_prompt_is_refused(fate: Fate) -> None:
    with pytest.raises(ConservationError, match="prompt x is .*, but is not in flight: never drawn"):
        SETTLE[fate](drawn("a"), "x")


def test_a_prompt_is_drawn_once() -> None:
    with pytest.raises(ConservationError, match="a was drawn twice"):
        drawn("a", "a")


def test_a_step_may_be_reported_twice_and_counts_once() -> None:
    fates = drawn("a", "b", "c")
    settlements = told(fates)
    for _ in range(2):
        fates.train(1, [group("a"), group("b")])
    assert (fates.step, fates.count("trained"), len(settlements)) == (1, 2, 1)
    for step in (1, 3):
        with pytest.raises(ConservationError, match=f"step {step} cannot be committed after step 1"):
            fates.train(step, [group("c")])
    with pytest.raises(ConservationError, match="step 2 holds a group twice: c"):
        fates.train(2, [group("c"), group("c")])


def test_prompts_that_are_lost_or_left_over_are_found() -> None:
    fates = drawn("a", "c")
    with pytest.raises(ConservationError, match="2 prompts were lost, e.g. \\['a', 'c'\\]"):
        fates.check(())
    fates.train(1, [group("a")])
    with pytest.raises(
        ConservationError, match="1 have a fate and are still in the pipeline, e.g. \\['a'\\]"
    ):
        fates.check({"a", "c"})
    fates.check({"c"})
    fates.drawn += 1
    with pytest.raises(ConservationError, match="3 prompts drawn, 1 settled, 1 in flight"):
        fates.check({"c"})


def test_a_register_continues_from_a_checkpoint_without_telling_anyone() -> None:
    fates = FateRegister()
    settlements = told(fates)
    counts = {"trained": 4, "filtered": 1, "expired": 0, "failed": 0}
    fates.restore(step=2, drawn=6, in_flight=["a"], counts=counts)
    assert (fates.counts(), settlements) == (counts, [])
    fates.train(3, [group("a")])
    assert (fates.step, fates.count("trained")) == (3, 5)
