# SPDX-License-Identifier: Apache-2.0
"""The lists of untrained groups: their members, and what an arrival costs, counted in comparisons."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from recipe.async_pipeline.core.groups.items import Group, Trajectory
from recipe.async_pipeline.core.groups.untrained_groups import Entry, UntrainedGroups


class Counted(int):
    """A number that counts how often it is compared."""

    comparisons: ClassVar[int] = 0

    def _counted(self, compare: Callable[[int, int], Any], other: int) -> bool:
        Counted.comparisons += 1
        return bool(compare(int(self), int(other)))

    def __lt__(self, other: int) -> bool:
        return self._counted(int.__lt__, other)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int) and self._counted(int.__eq__, other)

    __hash__ = int.__hash__


def group(uid: str, version: int = 0) -> Group:
    one = Trajectory(key=uid, first_version=version, last_version=version, num_tokens=1)
    return Group(uid=uid, step=1, trajectories=(one,))


def drawn(count: int, order: str, straggler: str, *, batch: int = 2) -> UntrainedGroups:
    """Four batches' groups, as with a lag of 3; all but the first are in generation."""
    groups = UntrainedGroups(batch=batch, oldest=batch, order=order, straggler=straggler)  # type: ignore[arg-type]
    groups.promise(count, due=3)
    for number in range(count):
        groups.draw(str(number), Entry(number=Counted(number), due=Counted(3)))
        if number:
            groups.watch(str(number))
    return groups


def comparisons_of(count: int, order: str, straggler: str) -> float:
    """Return the comparisons for each arrival while one group holds up the first step."""
    groups = drawn(count, order, straggler, batch=count // 4)
    arriving = [str(number) for number in range(1, count)]
    random.Random(1).shuffle(arriving)
    Counted.comparisons = 0
    for uid in arriving:
        groups.hold(uid, group(uid))
        groups.finish(uid, group(uid), Counted(3))
        while order == "finished" and groups.in_the_way(1, 3) is not None:
            groups.take()
        assert groups.in_the_way(1, 3) is None
    return Counted.comparisons / len(arriving)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["drawn", "finished"])
@pytest.mark.parametrize("straggler", ["wait", "regenerate", "drop", "mask"])
def test_an_arrival_costs_a_binary_search(order: str, straggler: str) -> None:
    """Eight times the groups are three steps more in each search; sorting would cost eight times as much."""
    few, many = (comparisons_of(count, order, straggler) for count in (512, 4096))
    assert many <= 1.5 * few
    assert many <= 250


def test_counts_what_is_promised_drawn_and_finished() -> None:
    groups = UntrainedGroups(batch=2, oldest=2, order="drawn", straggler="wait")
    groups.promise(3, due=1)
    groups.draw("a", Entry(number=0, due=1))
    assert (len(groups), groups.promised, groups.finished) == (3, 2, 0)
    groups.finish("a", group("a"), due=2)
    assert (len(groups), groups.promised, groups.finished) == (3, 2, 1)
    assert groups.remove("a").group == group("a")
    assert (len(groups), groups.finished) == (2, 0)


def test_only_a_group_in_generation_stands_in_the_way_or_is_recalled() -> None:
    groups = drawn(4, "drawn", "drop")
    groups.finish("2", group("2"), due=3)
    groups.finish("3", group("3"), due=3)
    assert groups.in_the_way(1, 3) is None, "generation of 0 has not begun"
    groups.watch("0")
    assert groups.in_the_way(1, 3) == ["0", "1"]
    groups.hold("1", group("1"))
    assert groups.in_the_way(1, 3) is None, "1 has arrived"
    groups.finish("1", group("1"), due=3)
    assert groups.in_the_way(1, 3) == ["0"]


def test_a_renewed_group_goes_to_the_end_and_is_not_recalled_before_it_begins_again() -> None:
    groups = drawn(4, "finished", "regenerate")
    recall = groups.entries["1"].recall
    assert groups.renew("1", number=9, due=5) is recall
    assert (groups.entries["1"].number, groups.entries["1"].due, groups.entries["1"].recall) == (9, 5, None)


def test_a_step_takes_the_first_due_groups() -> None:
    groups = UntrainedGroups(batch=2, oldest=2, order="finished", straggler="wait")
    for number, (uid, due) in enumerate([("a", 2), ("b", 1), ("c", 1), ("d", 2)]):
        groups.restore(uid, Entry(number=number, due=due, group=group(uid)))
    assert [one.uid for one in groups.take()] == ["b", "c"]
    assert [one.uid for one in groups.take()] == ["a", "d"]
    assert len(groups) == 0
