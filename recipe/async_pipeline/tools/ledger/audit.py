# SPDX-License-Identifier: Apache-2.0
"""Audit a ledger record by record, from nothing but its records.

    conservation     every prompt that was dispatched has exactly one fate, or is in flight; none is in
                     flight if the run completed
    no double use    no trajectory is in two steps
    order            steps are committed one after the other; served versions only grow
    lag              no token that was trained was older than `max_lag` when its step began
    no gap           record numbers have no gap; records that a resumed run made void are left out
    sums             what the run counted, in a step and at its end, is what its records add up to

See `core.groups.ledger` for the records.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, get_args

from ...core.groups.fates import Fate
from ...core.groups.items import Trajectory, last_keys, plain
from ...core.lag.token_ages import oldest_in, oldest_trained

SHOWN = 20
"""Violations that are kept in full; further ones are only counted."""
ENDS = ("completed", "interrupted", "failed")
LedgerFields = Mapping[str, Any]


@dataclass(kw_only=True)
class Audit:
    """The result of an audit."""

    status: str = "running"
    """How the run ended: completed, interrupted or failed; running if it has not ended."""
    steps: int = 0
    dispatched: int = 0
    trained: int = 0
    filtered: int = 0
    expired: int = 0
    failed: int = 0
    in_flight: int = 0
    regenerated: int = 0
    trajectories_trained: int = 0
    episodes_repeated: int = 0
    """Attempts of finished responses that failed before the one that succeeded."""
    episodes_redundant: int = 0
    """Episodes that were ended because enough others of their group had finished."""
    ends: Counter[str] = field(default_factory=Counter)
    """Ends of the episodes of finished responses; `done` is not counted."""
    lag_max: int = 0
    max_lag: int | None = None
    processes: int = 0
    """Processes that wrote the ledger: one, and one more for each resumption."""
    void: int = 0
    """Records of work that was repeated."""
    begun_elsewhere: bool = False
    """The run resumed from a checkpoint of another ledger; earlier responses are not counted here."""
    violations: list[str] = field(default_factory=list)
    num_violations: int = 0

    @property
    def ok(self) -> bool:
        return self.num_violations == 0

    def as_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self)}


class _Books:
    """The account that the auditor keeps."""

    def __init__(self) -> None:
        self.audit = Audit()
        self._number = 0
        self._live: dict[str, list[Trajectory] | None] = {}
        """Prompts without a fate; for finished ones, what is recorded of each trajectory."""
        self._fates: dict[str, Fate] = {}
        self._keys: set[str] = set()
        """Trajectories that were trained."""
        self._versions: dict[str, int] = {}
        self._served = -1
        self._last_step = 0
        self._handlers: Mapping[str, Callable[[LedgerFields], None]] = {
            "opened": self._opened,
            "resumed": self._resumed,
            "dispatched": self._dispatched,
            "again": self._again,
            "finished": self._finished,
            "scored": lambda record: None,
            "trained": self._trained,
            "served": self._serves,
            **dict.fromkeys(("skipped", "checkpointed"), lambda record: None),
            "closed": self._closed,
            **dict.fromkeys(("filtered", "expired", "failed"), self._given_up),
        }

    def read(self, record: LedgerFields) -> None:
        kind, number = str(record.get("kind")), record.get("n")
        if not isinstance(number, int) or kind not in self._handlers:
            self._violation(
                kind
                if kind.startswith("line ")
                else f"a record that no ledger has: {str(dict(record))[:120]}"
            )
            return
        first = self._number == 0 and kind == "resumed"
        if number != self._number + 1 and not first:
            wrong = (
                "the records between them are missing"
                if number > self._number
                else "it comes twice"
                if number == self._number
                else "out of order"
            )
            self._violation(f"record {number} ({kind}) follows record {self._number}: {wrong}")
        self._number = number
        try:
            self._handlers[kind](record)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            self._violation(f"record {number} ({kind}) is not complete: {type(error).__name__} {error}")

    def finished(self) -> Audit:
        self.audit.in_flight = len(self._live)
        for fate, count in self._counts().items():
            setattr(self.audit, fate, count)
        return self.audit

    def _counts(self) -> dict[str, int]:
        """Return the prompts of each fate so far, including an earlier ledger's."""
        counts = Counter(self._fates.values())
        return {fate: getattr(self.audit, fate) + counts[fate] for fate in get_args(Fate)}

    def _violation(self, text: str) -> None:
        self.audit.num_violations += 1
        if len(self.audit.violations) < SHOWN:
            self.audit.violations.append(text)

    def _require_live(self, uid: str, what: str) -> bool:
        if uid in self._live:
            return True
        had = f"was {self._fates[uid]} before" if uid in self._fates else "was never dispatched"
        self._violation(f"prompt {uid} is {what}, but {had}")
        return False

    # One record each.

    def _begin(self, record: LedgerFields) -> None:
        self.audit.processes += 1
        self.audit.status = "running"
        self.audit.max_lag, self._last_step = int(record["max_lag"]), int(record["last_step"])
        self._served = -1

    def _opened(self, record: LedgerFields) -> None:
        if self._number != 1:
            self._violation(f"record {self._number} opens a ledger that was open")
        self._begin(record)

    def _resumed(self, record: LedgerFields) -> None:
        """Read the record of a resumption; also the first record of a run resumed from another ledger."""
        if self.audit.processes == 0:
            self._live = dict.fromkeys(record["in_flight"])
            self.audit.steps, self.audit.dispatched = int(record["step"]), int(record["drawn"])
            self.audit.regenerated = int(record["regenerated"])
            for fate in get_args(Fate):
                setattr(self.audit, fate, int(record[fate]))
            self._finished_elsewhere = set(self._live)
            self.audit.begun_elsewhere = True
        self._begin(record)
        if int(record["step"]) != self.audit.steps:
            self._violation(
                f"the run was resumed after step {record['step']}, but step {self.audit.steps} was the last"
            )
        if set(record["in_flight"]) != set(self._live):
            differing = sorted(set(record["in_flight"]) ^ set(self._live))
            self._violation(
                f"{len(differing)} prompts are in flight only before or after step {record['step']} was "
                f"resumed: {differing[:3]}"
            )

    _finished_elsewhere: set[str] = set()
    """Prompts whose responses may be recorded in another ledger."""

    def _dispatched(self, record: LedgerFields) -> None:
        uid = str(record["uid"])
        if uid in self._live or uid in self._fates:
            self._violation(f"prompt {uid} was dispatched twice")
            return
        self._live[uid] = None
        self.audit.dispatched += 1

    def _again(self, record: LedgerFields) -> None:
        uid = str(record["uid"])
        if self._require_live(uid, f"answered again ({record['why']})"):
            self._live[uid] = None
            self._finished_elsewhere.discard(uid)
            self.audit.regenerated += 1

    def _finished(self, record: LedgerFields) -> None:
        uid = str(record["uid"])
        if not self._require_live(uid, "finished"):
            return
        if self._live[uid] is not None:
            self._violation(f"prompt {uid} was finished twice")
        self._live[uid] = [_trajectory_of(one) for one in record["trajectories"]]
        last = last_keys(str(one["key"]) for one in record["trajectories"])
        episodes = [one for one in record["trajectories"] if one["key"] in last]
        self.audit.episodes_repeated += sum(int(one.get("attempts", 1)) - 1 for one in episodes)
        self.audit.episodes_redundant += int(record.get("redundant", 0))
        self.audit.ends.update(str(one["end"]) for one in episodes if "end" in one)
        self._finished_elsewhere.discard(uid)

    def _given_up(self, record: LedgerFields) -> None:
        uid, fate = str(record["uid"]), record["kind"]
        if self._require_live(uid, fate):
            del self._live[uid]
            self._fates[uid] = fate

    def _trained(self, record: LedgerFields) -> None:
        step, uids = int(record["step"]), [str(uid) for uid in record["uids"]]
        if step != self.audit.steps + 1:
            self._violation(f"step {step} was committed after step {self.audit.steps}")
        self.audit.steps = step
        finished = [responses for uid in uids if (responses := self._live.get(uid)) is not None]
        counted, told = int(record["trajectories"]), sum(map(len, finished))
        if counted != told and len(finished) == len(uids):
            self._violation(f"step {step} counts {counted} trajectories, its prompts have {told}")
        for uid in uids:
            if self._require_live(uid, f"trained in step {step}"):
                responses = self._live.pop(uid)
                self._fates[uid] = "trained"
                self._check_responses(step, uid, responses, record.get("masked_before", {}))
        self.audit.trajectories_trained += counted

    def _check_responses(
        self, step: int, uid: str, responses: Sequence[Trajectory] | None, masked_before: Mapping[str, int]
    ) -> None:
        if responses is None:
            if uid not in self._finished_elsewhere:
                self._violation(f"prompt {uid} was trained in step {step}, but was not finished")
            return
        responses = [replace(one, masked_before=int(masked_before.get(one.key, 0))) for one in responses]
        if responses and oldest_in(responses) is None:
            self._violation(f"prompt {uid} was trained in step {step} with every token masked")
        for one in responses:
            key, first = one.key, oldest_trained(one)
            if key in self._keys:
                self._violation(f"trajectory {key} was trained in step {step} and before")
            self._keys.add(key)
            if first is None:
                continue
            lag = step - 1 - first
            self.audit.lag_max = max(self.audit.lag_max, lag)
            if self.audit.max_lag is not None and not 0 <= lag <= self.audit.max_lag:
                self._violation(
                    f"trajectory {key} has lag {lag} in step {step}; from 0 to {self.audit.max_lag} is "
                    "allowed"
                )

    def _serves(self, record: LedgerFields) -> None:
        version = int(record["version"])
        if version <= self._served:
            self._violation(f"version {version} was served after version {self._served}")
        if version > self.audit.steps:
            self._violation(f"version {version} was served before step {version} was trained")
        self._served = version

    def _closed(self, record: LedgerFields) -> None:
        self.audit.status = str(record["status"])
        if self.audit.status not in ENDS:
            self._violation(f"the run ended as {self.audit.status!r}; it can be {', '.join(ENDS)}")
        if self.audit.status == "completed":
            if self._live:
                self._violation(
                    f"the run completed with {len(self._live)} prompts in flight, e.g. "
                    f"{sorted(self._live)[:3]}"
                )
            if self.audit.steps < self._last_step:
                self._violation(f"the run completed after step {self.audit.steps} of {self._last_step}")
        if int(record["drawn"]) != self.audit.dispatched or int(record["in_flight"]) != len(self._live):
            self._violation(
                f"the run counts {record['drawn']} prompts and {record['in_flight']} in flight, its ledger "
                f"{self.audit.dispatched} and {len(self._live)}"
            )
        for fate, count in self._counts().items():
            if int(record[fate]) != count:
                self._violation(f"the run counts {record[fate]} prompts {fate}, its ledger {count}")


def _trajectory_of(record: LedgerFields) -> Trajectory:
    """Return what the age of a trajectory depends on."""
    key, spans = str(record["key"]), record.get("spans")
    return Trajectory(
        key=key,
        first_version=int(record["first"]),
        last_version=int(record.get("last", record["first"])),
        num_tokens=int(record.get("tokens", 0)),
        spans=None if spans is None else plain(spans),
    )


def audit(records: Iterable[LedgerFields]) -> Audit:
    """Check the records that count, in order; see `valid`."""
    books = _Books()
    for record in records:
        books.read(record)
    found = books.finished()
    if found.processes == 0:
        begun = found.num_violations or found.dispatched
        found.violations.insert(
            0,
            "the first record is missing, which opens the ledger"
            if begun
            else "the ledger has no whole record",
        )
        found.num_violations += 1
    return found


def horizon(resumptions: Sequence[tuple[int, int]]) -> Callable[[int, int], bool]:
    """Return a function of place and number that tells whether a record counts.

    `resumptions`: `(place, number)` of every `resumed` record. A record counts unless a later process was
    resumed from before it.
    """
    limits: list[tuple[int, int]] = []
    least = None
    for place, number in reversed(resumptions):
        least = number if least is None else min(least, number)
        limits.append((place, least))
    limits.reverse()

    def counts(place: int, number: int) -> bool:
        return all(number < limit for at, limit in limits if at > place)

    return counts


def valid(records: Sequence[LedgerFields]) -> Iterator[LedgerFields]:
    """Yield the records that count."""
    resumptions = [(i, int(r["n"])) for i, r in enumerate(records) if r["kind"] == "resumed"]
    counts = horizon(resumptions)
    yield from (record for i, record in enumerate(records) if counts(i, int(record["n"])))
