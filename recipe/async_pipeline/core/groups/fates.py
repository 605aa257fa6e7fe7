# SPDX-License-Identifier: Apache-2.0
"""The register of every prompt's fate. Each prompt that was drawn gets exactly one.

    draw ──► in flight ──┬─► trained    an optimizer step has consumed its group
                         ├─► filtered   finished, but its responses teach nothing
                         ├─► expired    given up, because it held up a step
                         └─► failed     its data is bad

A stage that decides a fate reports it to the register only: `settle` for one prompt, `train` for all groups
of an optimizer step. The register checks the decision, changes its counts, and then calls its subscribers in
the order in which they subscribed: the ledger, the message queue, the prompt source, the meters. A prompt
without a fate is in flight; a checkpoint holds those, and they get their fate in the process that resumes
from it.

Memory does not grow with the run: the register holds the prompts in flight, counts, and the prompts of the
last step, so that this step may be reported twice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from ...errors import ConservationError
from .items import Group

NotTrained = Literal["filtered", "expired", "failed"]
Fate = Literal["trained", NotTrained]
FATES: tuple[Fate, ...] = get_args(Fate)


@dataclass(frozen=True, kw_only=True)
class Settlement:
    """Prompts that got the same fate at the same moment."""

    fate: Fate
    uids: tuple[str, ...]
    why: str = ""
    step: int | None = None
    """The optimizer step that trained them; None: another fate."""
    groups: tuple[Group, ...] = ()
    """Their finished groups. Empty for a prompt that was given up before its group was finished."""
    skipped: str = ""
    """Why the trainer did not apply the update of that step; empty if it did."""


class FateRegister:
    """Belongs to one event loop."""

    def __init__(self, *, first_step: int = 1) -> None:
        self.step = first_step - 1
        """The last optimizer step that was reported."""
        self.drawn = 0
        """Prompts."""
        self._in_flight: dict[str, None] = {}
        """An ordered set."""
        self._counts: dict[Fate, int] = dict.fromkeys(FATES, 0)
        self._last: frozenset[str] = frozenset()
        """The prompts of the last step."""
        self._subscribers: list[Callable[[Settlement], object]] = []

    @property
    def in_flight(self) -> Collection[str]:
        """Prompts without a fate, in the order in which they were drawn."""
        return self._in_flight.keys()

    @property
    def settled(self) -> int:
        """The number of prompts that have a fate."""
        return sum(self._counts.values())

    def count(self, fate: Fate) -> int:
        """Return the number of prompts with this fate."""
        return self._counts[fate]

    def counts(self) -> dict[str, int]:
        """Return the number of prompts by fate."""
        return {str(fate): count for fate, count in self._counts.items()}

    def subscribe(self, call: Callable[[Settlement], object]) -> None:
        """Call `call` with each later settlement. What it raises reaches the caller of `settle`."""
        self._subscribers.append(call)

    # Changes.

    def draw(self, uid: str) -> None:
        """Take a new prompt into the register. Raises ConservationError if it is in flight already."""
        if uid in self._in_flight:
            raise ConservationError(f"prompt {uid} was drawn twice")
        self._in_flight[uid] = None
        self.drawn += 1

    def settle(self, uid: str, fate: NotTrained, *, why: str = "", group: Group | None = None) -> None:
        """Give a prompt that no step will train its fate.

        Raises ConservationError if the prompt was never drawn or has a fate already; nothing changes then.
        """
        self.require(uid, fate)
        groups = () if group is None else (group,)
        self._settle(Settlement(fate=fate, uids=(uid,), why=why, groups=groups))

    def train(self, step: int, groups: Sequence[Group], *, skipped: str = "") -> None:
        """Settle the groups of an optimizer step as trained. `skipped`: see `Settlement`.

        The last step may be reported again with the same groups; nothing changes then.
        Raises ConservationError if `step` is not the next one, if a group is not in flight, or if it is there
        twice; nothing changes then.
        """
        uids = tuple(group.uid for group in groups)
        if step == self.step and self._last == frozenset(uids):
            return
        if step != self.step + 1:
            raise ConservationError(f"step {step} cannot be committed after step {self.step}")
        for uid in uids:
            self.require(uid, f"trained in step {step}")
        if len(set(uids)) < len(uids):
            twice = min(uid for uid in uids if uids.count(uid) > 1)
            raise ConservationError(f"step {step} holds a group twice: {twice}")
        self.step, self._last = step, frozenset(uids)
        self._settle(Settlement(fate="trained", uids=uids, step=step, groups=tuple(groups), skipped=skipped))

    def restore(self, *, step: int, drawn: int, in_flight: Sequence[str], counts: Mapping[str, int]) -> None:
        """Continue from a checkpoint, before anything else happens. Subscribers are not called."""
        self.step, self.drawn = step, drawn
        self._in_flight = dict.fromkeys(in_flight)
        self._counts = {fate: counts[fate] for fate in FATES}

    # Checks.

    def require(self, uid: str, what: str) -> None:
        """Raise ConservationError if a prompt that is `what` is not in flight."""
        if uid not in self._in_flight:
            raise ConservationError(
                f"prompt {uid} is {what}, but is not in flight: never drawn, or it has a fate already"
            )

    def check(self, live: Collection[str]) -> None:
        """Compare with `live`: the prompts in the message queue and in steps that are not trained yet.

        Raises ConservationError if these are not the prompts in flight, or if the counts do not add up.
        """
        lost, strange = self._in_flight.keys() - set(live), set(live) - self._in_flight.keys()
        found = []
        if lost:
            found.append(f"{len(lost)} prompts were lost, e.g. {sorted(lost)[:3]}")
        if strange:
            found.append(
                f"{len(strange)} have a fate and are still in the pipeline, e.g. {sorted(strange)[:3]}"
            )
        if found:
            raise ConservationError(f"after step {self.step}, of {self.drawn} prompts {'; '.join(found)}")
        if self.drawn != self.settled + len(self._in_flight):
            raise ConservationError(
                f"{self.drawn} prompts drawn, {self.settled} settled, {len(self._in_flight)} in flight"
            )

    def _settle(self, settlement: Settlement) -> None:
        for uid in settlement.uids:
            del self._in_flight[uid]
        self._counts[settlement.fate] += len(settlement.uids)
        for call in self._subscribers:
            call(settlement)
