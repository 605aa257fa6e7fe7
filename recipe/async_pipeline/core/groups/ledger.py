# SPDX-License-Identifier: Apache-2.0
"""The journal of every prompt: what happened to it until it got its fate.

    dispatched ──► finished ──► trained             in step s, which commits all of its groups at once
        ▲  │           └──────► filtered, failed    not trained, and another prompt is drawn instead
     again └──────────────────► expired             given up, because it held up a step

Each change is one record that goes to the subscribers; records are numbered without a gap. The fates
themselves are decided elsewhere: the ledger subscribes to the register (`core.groups.fates`) and records
every settlement.

A checkpoint holds the account (`state`) with the number of the last record that it covers. A resumed run
numbers its first record, `resumed`, next to that one. All records with that number or a higher one that
precede it in the file are void: they describe work that the checkpoint does not hold and that is repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ...errors import ConservationError
from ..lag.token_ages import oldest_trained
from .fates import FateRegister, Settlement
from .items import Group, Trajectory, pairs_of

Why = Literal["stale", "flawed", "resumed"]
"""Why responses to a prompt are generated again: it held up a step, its data was bad, or the run was resumed.
"""


@dataclass(frozen=True, kw_only=True)
class LedgerRecord:
    """One change."""

    number: int
    """From 1, without a gap."""
    kind: str
    fields: Mapping[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Return one flat mapping: n, kind, then the fields."""
        return {"n": self.number, "kind": self.kind, **self.fields}


@dataclass(frozen=True, kw_only=True)
class LedgerState:
    """The account after record `number`, when `step` was the last step that was trained."""

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
    skipped: int = 0


class Ledger:
    """Writes the records. Belongs to one event loop."""

    def __init__(
        self, fates: FateRegister, *, max_lag: int, last_step: int, facts: Mapping[str, Any] | None = None
    ) -> None:
        """Subscribe to `fates`. `facts` are added to the first record of the process."""
        self._fates = fates
        self._facts = {"max_lag": max_lag, "last_step": last_step, **(facts or {})}
        self._finished: set[str] = set()
        """Prompts in flight whose responses are finished."""
        self._resumed = False
        self._subscribers: list[Callable[[LedgerRecord], object]] = []
        self.number = 0
        """The number of the last record."""
        self.regenerated = 0
        self.trajectories_trained = 0
        self.lag_max = 0
        self.skipped = 0
        """Steps whose update was not applied, or not all of it."""
        fates.subscribe(self._settled)

    def subscribe(self, call: Callable[[LedgerRecord], object]) -> None:
        """Call `call` with each later record, in order. What it raises reaches the caller."""
        self._subscribers.append(call)

    # What happens.

    def open(self) -> None:
        """Write the first record of a process: the state that it starts from."""
        if not self._resumed:
            self._append("opened", step=self._fates.step, **self._facts)
            return
        state = self.state()
        sums = {"drawn": state.drawn, **state.fates, "regenerated": state.regenerated}
        self._append("resumed", step=state.step, in_flight=list(state.in_flight), **sums, **self._facts)

    def draw(self, uid: str, step: int, version: int) -> None:
        """Enter a prompt that was drawn, for `step` at the earliest, while `version` was served.

        Raises ConservationError if it is in flight already.
        """
        self._fates.draw(uid)
        self._append("dispatched", uid=uid, step=step, version=version)

    def generate_again(self, uid: str, why: Why, version: int, kept_tokens: int = 0) -> None:
        """Note that a prompt is dispatched again while `version` is served.

        `kept_tokens` of its responses need not be generated again. Raises ConservationError if the prompt is
        not in flight.
        """
        self._fates.require(uid, f"answered again ({why})")
        self._finished.discard(uid)
        self.regenerated += 1
        self._append("again", uid=uid, why=why, version=version, kept_tokens=kept_tokens)

    def finish(self, group: Group) -> None:
        """Note that all responses of a group are finished.

        Raises ConservationError if its prompt is not in flight or was finished before.
        """
        self._fates.require(group.uid, "finished")
        if group.uid in self._finished:
            raise ConservationError(f"prompt {group.uid} is finished, but was finished before")
        self._finished.add(group.uid)
        more = {"redundant": group.redundant} if group.redundant else {}
        trajectories = [_fields_of(one) for one in group.trajectories]
        self._append("finished", uid=group.uid, trajectories=trajectories, **more)

    def score(self, group: Group) -> None:
        """Note the rewards of a group that was finished without them."""
        self._append("scored", uid=group.uid, rewards=[one.reward for one in group.trajectories])

    def serve(self, version: int) -> None:
        """Note that all replicas serve a version."""
        self._append("served", version=version)

    def skip(self, step: int, why: str) -> None:
        """Note that the critic's update of a step was not applied; the record of its training precedes."""
        self.skipped += 1
        self._append("skipped", step=step, why=why)

    def checkpointed(self, step: int, number: int) -> None:
        """Note that a checkpoint of `step`, which covers the records up to `number`, can be resumed from."""
        self._append("checkpointed", step=step, seen=number)

    def close(self, status: str) -> None:
        """Write the last record of a process."""
        fates = self._fates
        sums = {"drawn": fates.drawn, "in_flight": len(fates.in_flight), **fates.counts()}
        self._append("closed", status=status, step=fates.step, **sums)

    # Checkpoints.

    def state(self) -> LedgerState:
        """Return what a checkpoint holds of the account."""
        return LedgerState(
            number=self.number,
            step=self._fates.step,
            in_flight=tuple(self._fates.in_flight),
            drawn=self._fates.drawn,
            fates=self._fates.counts(),
            regenerated=self.regenerated,
            trajectories_trained=self.trajectories_trained,
            lag_max=self.lag_max,
            skipped=self.skipped,
        )

    def restore(self, state: LedgerState, finished: Collection[str]) -> None:
        """Continue from a checkpoint, together with the register, before anything else happens.

        `finished`: prompts whose responses the checkpoint holds.
        """
        self._fates.restore(step=state.step, drawn=state.drawn, in_flight=state.in_flight, counts=state.fates)
        self._resumed, self.number, self._finished = True, state.number, set(finished)
        self.regenerated, self.lag_max = state.regenerated, state.lag_max
        self.trajectories_trained, self.skipped = state.trajectories_trained, state.skipped

    def _settled(self, settled: Settlement) -> None:
        self._finished.difference_update(settled.uids)
        if settled.step is not None:
            self._trained(settled.step, settled)
        for uid in settled.uids if settled.step is None else ():
            self._append(settled.fate, uid=uid, **({"why": settled.why} if settled.why else {}))

    def _trained(self, step: int, settled: Settlement) -> None:
        trajectories = [one for group in settled.groups for one in group.trajectories]
        versions = [version for one in trajectories if (version := oldest_trained(one)) is not None]
        lag = step - 1 - min(versions, default=step - 1)
        masked = {one.key: one.masked_before for one in trajectories if one.masked_before}
        more: dict[str, Any] = {"masked_before": masked} if masked else {}
        if settled.skipped:
            self.skipped += 1
            more["skipped"] = settled.skipped
        self.trajectories_trained += len(trajectories)
        self.lag_max = max(self.lag_max, lag)
        uids = list(settled.uids)
        self._append("trained", step=step, uids=uids, trajectories=len(trajectories), lag_max=lag, **more)

    def _append(self, kind: str, **fields: Any) -> None:
        self.number += 1
        record = LedgerRecord(number=self.number, kind=kind, fields=fields)
        for call in self._subscribers:
            call(record)


def _fields_of(one: Trajectory) -> dict[str, Any]:
    """Return what the ledger records of a trajectory."""
    fields = {"key": one.key, "first": one.first_version, "last": one.last_version, "tokens": one.num_tokens}
    if one.spans is not None:
        fields["spans"] = pairs_of(one.spans)
    if one.reward is not None:
        fields["reward"] = one.reward
    if one.turns is not None and one.turns > 1:
        fields["turns"] = one.turns
    if one.end != "done":
        fields["end"] = one.end
    if one.attempts > 1:
        fields["attempts"] = one.attempts
    return fields
