# SPDX-License-Identifier: Apache-2.0
"""The state that a checkpoint holds of the pipeline: no tensors, no tasks, no clock.

It is taken in one turn of the event loop, after the step was trained and before the weights change again.
Every prompt that was drawn is in exactly one place then:

    trained, filtered, expired, failed   in the counts of the register only
    taken by a later step                `QueueState.taken`: that step will train these groups
    finished                             an entry with a group: it waits in the queue
    answered                             an entry with a response: not decided yet whether it is trained
    in flight                            an entry with neither: its prompt is dispatched again
    not entered                          with the trainer, which hands prompts out in the order of its draws

Admissions are not kept: the resumed process requests new ones as soon as weights are served.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .groups.items import Group
from .groups.ledger import LedgerState


@dataclass(frozen=True, kw_only=True)
class EntryState:
    """A group in the message queue."""

    uid: str
    number: int
    """Position in the order of draws."""
    due: int
    group: Group | None = None
    """Finished, and waiting for a step."""
    answer: Group | None = None
    """Finished, and not decided yet whether it is trained."""


@dataclass(frozen=True, kw_only=True)
class QueueState:
    """The message queue."""

    next_number: int
    entries: tuple[EntryState, ...]
    taken: Mapping[int, tuple[Group, ...]]
    """Groups of the steps that were taken and are not trained, by step."""

    def undecided(self) -> Iterator[Group]:
        """Yield the finished groups for which it is not decided whether they are trained."""
        yield from (entry.answer for entry in self.entries if entry.answer is not None)


@dataclass(frozen=True, kw_only=True)
class FlowState:
    """The pipeline after `step` was trained."""

    step: int
    queue: QueueState
    ledger: LedgerState
    depth: int | None = None
    """Batches that may be ahead; None in checkpoints of earlier versions."""

    def finished(self) -> Iterator[Group]:
        """Yield the groups whose responses are finished."""
        for groups in self.queue.taken.values():
            yield from groups
        for entry in self.queue.entries:
            group = entry.group or entry.answer
            if group is not None:
                yield group

    def in_flight(self) -> tuple[str, ...]:
        """Return the prompts without finished responses, in the order in which to dispatch them again."""
        entries = sorted(self.queue.entries, key=lambda entry: entry.number)
        return tuple(entry.uid for entry in entries if entry.group is None and entry.answer is None)
