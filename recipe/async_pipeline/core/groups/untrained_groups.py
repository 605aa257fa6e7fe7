# SPDX-License-Identifier: Apache-2.0
"""The groups that no step has taken yet, ordered such that each question costs little.

A group is in one of three lists, each in the order in which steps take groups:

    draw ──► fixed ──► recallable ──► fixed ──► finished ──► taken
              │  watch     │    hold    │  finish
              │            ├─ recalled: drawn again, or removed
              │            └─ postponed: due later
              └─ not in generation, or (straggler `wait`) never recalled

So an arrival costs a binary search, and whether the next step can be taken costs one comparison, or in the
order of completion one search for each due step that occurs; there are about `max_lag` + 2 of those.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from .items import Group
from .recall import Recall

Order = Literal["drawn", "finished"]
"""Which groups a step takes: the next ones in the order of their draws, or the finished ones."""
Straggler = Literal["wait", "regenerate", "drop", "mask"]
"""What becomes of an unfinished group that holds up a step: the step waits, or the group is generated again,
or given up, or it is generated further and trained later without its oldest tokens.
"""
Key = tuple[Any, ...]
"""The uid, behind what groups are ordered by."""


@dataclass(kw_only=True)
class Entry:
    """A group that no step has taken."""

    number: int
    """Position in the order of draws."""
    due: int
    """The step that it should be in; the next one is the last that it may be in."""
    recall: Recall | None = None
    """Recalls it during its generation; None before and after that."""
    answer: Group | None = None
    """The generated group, until it is decided whether it is trained."""
    group: Group | None = None
    place: list[Key] = field(default_factory=list)
    """The list that it is in."""
    key: Key = ()


class UntrainedGroups:
    """Groups that were drawn, and the number of promised ones, which are granted but not drawn yet."""

    def __init__(self, *, batch: int, oldest: int, order: Order, straggler: Straggler) -> None:
        """`oldest`: groups of a step that may have the full lag."""
        self._batch, self._oldest, self._order, self._straggler = batch, oldest, order, straggler
        self.entries: dict[str, Entry] = {}
        self.promised = 0
        self._dues = Counter[int]()
        """Number of groups, drawn or promised, by due step; without zeros."""
        self._fixed: list[Key] = []
        self._recallable: list[Key] = []
        self._finished: list[Key] = []

    def __len__(self) -> int:
        return len(self.entries) + self.promised

    @property
    def finished(self) -> int:
        """Number of groups that wait for a step."""
        return len(self._finished)

    # Changes.

    def promise(self, count: int, due: int) -> None:
        """Add groups that will be drawn."""
        self.promised += count
        self._dues[due] += count

    def draw(self, uid: str, entry: Entry) -> None:
        """Replace one promised group by a drawn one of the same due step."""
        self.promised -= 1
        self.entries[uid] = entry
        self._put(uid, entry, self._fixed)

    def restore(self, uid: str, entry: Entry) -> None:
        """Add a group from a checkpoint."""
        self.entries[uid] = entry
        self._dues[entry.due] += 1
        self._put(uid, entry, self._fixed if entry.group is None else self._finished)

    def watch(self, uid: str) -> Recall:
        """Return what recalls a group of which generation begins."""
        entry = self.entries[uid]
        entry.recall = Recall()
        if self._straggler != "wait":
            self._put(uid, entry, self._recallable)
        return entry.recall

    def hold(self, uid: str, answer: Group | None) -> None:
        """Note that a group can no longer be recalled."""
        entry = self.entries[uid]
        entry.recall, entry.answer = None, answer
        self._put(uid, entry, self._fixed)

    def finish(self, uid: str, group: Group, due: int) -> None:
        """Note that a group waits for a step, by `due` at the latest or one step later."""
        entry = self.entries[uid]
        entry.recall, entry.answer, entry.group = None, None, group
        self._move(entry, due)
        self._put(uid, entry, self._finished)

    def renew(self, uid: str, number: int, due: int) -> Recall:
        """Treat a recalled group as if it were drawn now; returns its recall, which is not given yet."""
        entry = self.entries[uid]
        recall, entry.recall, entry.number = entry.recall, None, number
        assert recall is not None, "only a group in generation is recalled"
        self._move(entry, due)
        self._put(uid, entry, self._fixed)
        return recall

    def postpone(self, uid: str, due: int) -> None:
        """Let a group in generation be due later; it keeps its place in the order of draws."""
        entry = self.entries[uid]
        self._move(entry, due)
        self._put(uid, entry, self._recallable)

    def remove(self, uid: str) -> Entry:
        """Remove a group that no step will take; returns its entry."""
        entry = self.entries.pop(uid)
        self._take_out(entry)
        self._forget(entry.due)
        return entry

    def take(self) -> tuple[Group, ...]:
        """Remove the first batch of finished groups and return it."""
        chosen, self._finished[: self._batch] = self._finished[: self._batch], []
        groups = []
        for key in chosen:
            entry = self.entries.pop(key[-1])
            self._forget(entry.due)
            assert entry.group is not None
            groups.append(entry.group)
        return tuple(groups)

    # Decisions.

    def in_the_way(self, step: int, renewed_due: int) -> list[str] | None:
        """Return the groups in generation that have to be recalled or postponed before `step` takes the
        first batch of finished groups, or None if the step has to wait.

        `renewed_due`: the due step of a group that is generated again or postponed.
        """
        if len(self._finished) < self._batch:
            return None
        if self._order == "drawn":
            last = self._finished[self._batch - 1]
            count = None if self._fixed and self._fixed[0] < last else bisect_left(self._recallable, last)
        else:
            count = self._excess(step, renewed_due)
        return None if count is None else [key[-1] for key in self._recallable[:count]]

    def _excess(self, step: int, renewed_due: int) -> int | None:
        """Return how many groups in generation no longer fit if the step takes its batch, or None if
        some must come first.

        More groups must not be due by any step than the steps until then, and `oldest`, can take.
        """
        due_by = recalled = 0
        for due in sorted({*self._dues, renewed_due}):
            due_by += self._dues[due]
            # The step takes the groups with the first due steps; so do recalls.
            left = due_by - min(self._batch, bisect_left(self._finished, (due + 1,)))
            if due < renewed_due or self._straggler == "drop":
                left -= recalled
            # No later step may take a group that is due before this one, whatever `oldest` is.
            excess = left - max(0, self._batch * (due - step) + self._oldest)
            if excess <= 0:
                continue
            if self._straggler == "wait" or (self._straggler != "drop" and renewed_due <= due):
                return None
            recalled += excess
            if recalled > bisect_left(self._recallable, (due + 1,)):
                return None
        return recalled

    # The lists.

    def _put(self, uid: str, entry: Entry, place: list[Key]) -> None:
        key: Key = (entry.due, uid)
        if self._order == "drawn":
            key = (entry.number, uid)
        elif place is self._finished:
            key = (entry.due, entry.number, uid)
        if place is not entry.place or key != entry.key:
            self._take_out(entry)
            entry.place, entry.key = place, key
            insort(place, key)

    @staticmethod
    def _take_out(entry: Entry) -> None:
        if entry.key:
            del entry.place[bisect_left(entry.place, entry.key)]
            entry.key = ()

    def _move(self, entry: Entry, due: int) -> None:
        if due != entry.due:
            self._forget(entry.due)
            self._dues[due] += 1
            entry.due = due

    def _forget(self, due: int) -> None:
        self._dues[due] -= 1
        if not self._dues[due]:
            del self._dues[due]
