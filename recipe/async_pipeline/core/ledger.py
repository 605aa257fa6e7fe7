# SPDX-License-Identifier: Apache-2.0
"""The fate of every prompt: an account in memory of those that have none yet, and a journal of all of them.

    dispatched ──► finished ──► trained             in step s, which commits all of its groups at once
        ▲  │           └──────► filtered, failed    not trained, and another prompt is drawn instead
     again └──────────────────► expired             given up, because it held a step up

Each change is one record, numbered without a gap, that goes to the subscribers. What is kept in memory does
not grow
with the run: prompts without a fate, sums, and the groups of the last step, so that its commit may be
repeated.

A checkpoint holds the account (`state`) with the number of the last record that it has seen. A run that goes
on from
it numbers its first record, `resumed`, next to that one. So all records with that number or a higher one that
stand
before it in the file are void: they tell of work that the checkpoint does not hold and that is done anew.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ..errors import ConservationError
from .items import Group

Fate = Literal["trained", "filtered", "expired", "failed"]
"""filtered: finished, and teaches nothing. expired: given up, because it held a step up. failed: its data
is bad.
"""
NotTrained = Literal["filtered", "expired", "failed"]
Why = Literal["stale", "flawed", "resumed"]
"""Why a prompt is answered again: it held a step up, its data was bad, or the process that waited for it
ended.
"""


@dataclass(frozen=True, kw_only=True)
class LedgerRecord:
    """One change."""

    number: int
    """From 1, without a gap."""
    kind: str
    fields: Mapping[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """One flat mapping: n, kind, then the fields."""
        return {"n": self.number, "kind": self.kind, **self.fields}


@dataclass(frozen=True, kw_only=True)
class LedgerState:
    """The account after record `number`, when `step` was the last that was trained."""

    number: int
    step: int
    in_flight: tuple[str, ...]
    """Prompts without a fate, in the order in which they were drawn."""
    drawn: int
    fates: Mapping[str, int]
    """Groups of each fate."""
    regenerated: int
    trajectories_trained: int
    lag_max: int


class Ledger:
    """The account. Belongs to one event loop."""

    def __init__(
        self, *, max_lag: int, last_step: int, first_step: int = 1, facts: Mapping[str, Any] | None = None
    ) -> None:
        """`facts`: what else the first record says of the run."""
        self._facts = {"max_lag": max_lag, "last_step": last_step, **(facts or {})}
        self._number = 0
        self._step = first_step - 1
        self._in_flight: dict[str, bool] = {}
        """Prompts without a fate; are they finished?"""
        self._drawn = 0
        self._fates: dict[Fate, int] = dict.fromkeys(get_args(Fate), 0)
        self._last: frozenset[str] = frozenset()
        """The groups of the last step."""
        self._resumed = False
        self._subscribers: list[Callable[[LedgerRecord], object]] = []
        self.regenerated = 0
        self.trajectories_trained = 0
        self.lag_max = 0

    @property
    def step(self) -> int:
        """The last one that was committed."""
        return self._step

    @property
    def number(self) -> int:
        """Of the last record."""
        return self._number

    @property
    def drawn(self) -> int:
        """Prompts."""
        return self._drawn

    @property
    def in_flight(self) -> Collection[str]:
        """Prompts without a fate, in the order in which they were drawn."""
        return self._in_flight.keys()

    @property
    def settled(self) -> int:
        """Prompts that have a fate."""
        return sum(self._fates.values())

    def count(self, fate: Fate) -> int:
        """Groups of this fate."""
        return self._fates[fate]

    def subscribe(self, call: Callable[[LedgerRecord], object]) -> None:
        """Have `call` called with each record from now on, in order. What it raises comes through."""
        self._subscribers.append(call)

    # What happens.

    def open(self) -> None:
        """The first record of a process: what was there before."""
        if not self._resumed:
            self._append("opened", step=self._step, **self._facts)
            return
        state = self.state()
        sums = {"drawn": state.drawn, **state.fates, "regenerated": state.regenerated}
        self._append("resumed", step=state.step, in_flight=list(state.in_flight), **sums, **self._facts)

    def draw(self, uid: str, step: int, version: int) -> None:
        """A prompt was drawn, for `step` at the earliest, while `version` was served.

        Raises ConservationError: it is in flight already.
        """
        if uid in self._in_flight:
            raise ConservationError(f"prompt {uid} was drawn twice")
        self._in_flight[uid] = False
        self._drawn += 1
        self._append("dispatched", uid=uid, step=step, version=version)

    def answer_again(self, uid: str, why: Why, version: int, kept_tokens: int = 0) -> None:
        """A prompt goes out once more, while `version` is served; so many tokens of its answers need not be
        written anew.

        Raises ConservationError: it is not in flight.
        """
        self._require(uid, f"answered again ({why})")
        self._in_flight[uid] = False
        self.regenerated += 1
        self._append("again", uid=uid, why=why, version=version, kept_tokens=kept_tokens)

    def finish(self, group: Group) -> None:
        """All answers of a group are there. Raises ConservationError: it is not in flight, or was finished
        before.
        """
        self._require(group.uid, "finished")
        if self._in_flight[group.uid]:
            raise ConservationError(f"prompt {group.uid} is finished, but was finished before")
        self._in_flight[group.uid] = True
        self._append("finished", uid=group.uid, trajectories=[_told(one) for one in group.trajectories])

    def score(self, group: Group) -> None:
        """The rewards of a group that was finished without them."""
        self._append("scored", uid=group.uid, rewards=[one.reward for one in group.trajectories])

    def give_up(self, uid: str, fate: NotTrained, why: str = "") -> None:
        """A group will not be trained. Raises ConservationError: it is not in flight."""
        self._require(uid, fate)
        del self._in_flight[uid]
        self._fates[fate] += 1
        self._append(fate, uid=uid, **({"why": why} if why else {}))

    def commit(self, step: int, groups: Sequence[Group]) -> None:
        """The optimizer has taken `step`, over these groups. The last commit may be repeated, and is then not
        another one.

        Raises ConservationError: not the next step, a repetition with other groups, or a group that is not in
        flight.
        """
        uids = [group.uid for group in groups]
        if step == self._step and self._last == frozenset(uids):
            return
        if step != self._step + 1:
            raise ConservationError(f"step {step} cannot be committed after step {self._step}")
        for uid in uids:
            self._require(uid, f"trained in step {step}")
        if len(set(uids)) < len(uids):
            raise ConservationError(
                f"step {step} holds a group twice: {sorted(u for u in uids if uids.count(u) > 1)[0]}"
            )
        for uid in uids:
            del self._in_flight[uid]
        answers = [one for group in groups for one in group.trajectories]
        lag = max((step - 1 - one.first_version for one in answers), default=0)
        self._step, self._last = step, frozenset(uids)
        self._fates["trained"] += len(uids)
        self.trajectories_trained += len(answers)
        self.lag_max = max(self.lag_max, lag)
        self._append("trained", step=step, uids=uids, trajectories=len(answers), lag_max=lag)

    def serve(self, version: int) -> None:
        """All replicas serve a version."""
        self._append("served", version=version)

    def checkpointed(self, step: int, number: int) -> None:
        """A checkpoint of `step` that has seen the records up to `number` can be resumed from now on."""
        self._append("checkpointed", step=step, seen=number)

    def close(self, status: str) -> None:
        """The last record of a process."""
        sums = {"drawn": self._drawn, "in_flight": len(self._in_flight), **self._sums()}
        self._append("closed", status=status, step=self._step, **sums)

    # Checks.

    def check(self, live: Collection[str]) -> None:
        """`live`: the groups that the message queue has, and those that steps took which are not trained yet.

        Raises ConservationError: those are not the prompts without a fate, or the sums do not balance.
        """
        lost, strange = self._in_flight.keys() - set(live), set(live) - self._in_flight.keys()
        if lost or strange:
            what = [f"{len(lost)} prompts were lost, e.g. {sorted(lost)[:3]}"] if lost else []
            what += (
                [f"{len(strange)} have a fate and are still about, e.g. {sorted(strange)[:3]}"]
                if strange
                else []
            )
            raise ConservationError(f"after step {self._step}, of {self._drawn} prompts {'; '.join(what)}")
        if self._drawn != self.settled + len(self._in_flight):
            raise ConservationError(
                f"{self._drawn} prompts drawn, {self.settled} settled, {len(self._in_flight)} in flight"
            )

    # Checkpoints.

    def state(self) -> LedgerState:
        return LedgerState(
            number=self._number,
            step=self._step,
            in_flight=tuple(self._in_flight),
            drawn=self._drawn,
            fates=self._sums(),
            regenerated=self.regenerated,
            trajectories_trained=self.trajectories_trained,
            lag_max=self.lag_max,
        )

    def restore(self, state: LedgerState, finished: Collection[str]) -> None:
        """Go on from a checkpoint, before anything else happens. `finished`: prompts whose answers it
        holds.
        """
        self._resumed = True
        self._number, self._step, self._drawn = state.number, state.step, state.drawn
        self._in_flight = {uid: uid in finished for uid in state.in_flight}
        self._fates = {fate: state.fates[fate] for fate in get_args(Fate)}
        self.regenerated, self.lag_max = state.regenerated, state.lag_max
        self.trajectories_trained = state.trajectories_trained

    def _sums(self) -> dict[str, int]:
        return {str(fate): count for fate, count in self._fates.items()}

    def _require(self, uid: str, what: str) -> None:
        if uid not in self._in_flight:
            raise ConservationError(
                f"prompt {uid} is {what}, but is not in flight: never drawn, or it has a fate already"
            )

    def _append(self, kind: str, **fields: Any) -> None:
        self._number += 1
        record = LedgerRecord(number=self._number, kind=kind, fields=fields)
        for call in self._subscribers:
            call(record)


def _told(one: Any) -> dict[str, Any]:
    """What the ledger says of a trajectory."""
    told = {"key": one.key, "first": one.first_version, "last": one.last_version, "tokens": one.num_tokens}
    if one.spans is not None:
        told["spans"] = [list(span) for span in one.spans]
    if one.reward is not None:
        told["reward"] = one.reward
    return told
