# SPDX-License-Identifier: Apache-2.0
"""Accounts for the device-seconds of a run, record by record of its event log."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..core.events import LogRecord
from ..core.state_machine import TERMINAL
from .accounting import Accounting, PoolAccount, Seconds, StepAccount, sum_by_reason

_TERMINAL = {state.name for state in TERMINAL}


class Accountant:
    """A subscriber of the event log that accounts as it goes: a few additions a record."""

    def __init__(self) -> None:
        self._pools: dict[str, PoolAccount] = {}
        self._home: dict[str, str] = {}
        """Role to pool."""
        self._upstream: dict[str, tuple[str, ...]] = {}
        self._downstream: dict[str, tuple[str, ...]] = {}
        self._lanes: dict[tuple[str, int], str] = {}
        self._gated: dict[tuple[str, int], str] = {}
        self._holders: dict[str, dict[tuple[str, int], None]] = {}
        self._pending: dict[str, Seconds] = {}
        """Of the rollout's pool, until its servers say what they did."""
        self._steps: list[StepAccount] = []
        self._step: Seconds = defaultdict(float)
        self._batches_in_flight = 1
        self._loop_s = self._weights_s = 0.0
        """Of all steps; of the last publication."""
        self._startup_s = self._steady_from = self._now = 0.0
        self._serving = False
        self._warm: Accounting | None = None
        """All until the run was warm."""
        self._warm_t = self._warm_loop_s = 0.0
        """When it was; what `_loop_s` has of later."""

    def __call__(self, record: LogRecord) -> None:
        if record.event == "START" and record.role == "flow":
            self._begin(record.fields)
        self._pass(record.t - self._now)
        self._now = record.t
        self._note(record)
        if record.state is not None and record.role != "flow":
            self._move(record)

    def account(self) -> Accounting:
        """Everything up to the last record. Raises AccountingError: it does not add up."""
        pools = {
            name: PoolAccount(
                devices=p.devices,
                roles=p.roles,
                seconds=sum_by_reason(p.seconds, self._pending.get(name, {})),
            )
            for name, p in self._pools.items()
        }
        result = Accounting(
            wall_s=self._startup_s + self._now,
            pools=pools,
            steps=tuple(self._steps),
            steady_s=self._now - self._steady_from if self._serving else 0.0,
            loop_s=self._loop_s,
        )
        result.check()
        return result

    def since_warm(self) -> Accounting | None:
        """Only what went on since the first publication after the first step, by when code is compiled and
        caches are full.

        None: nothing did. Raises AccountingError: it does not add up.
        """
        return None if self._warm is None else self.account().after(self._warm, self._warm_loop_s)

    def settled(self) -> dict[str, Seconds]:
        """Device-seconds by pool and reason of which nothing will be corrected any more."""
        return {name: sum_by_reason(pool.seconds) for name, pool in self._pools.items()}

    def doing(self) -> dict[str, str]:
        """The reason of each pool's seconds from the last record on, as the roles see it."""
        return {name: self._reason(name) if self._serving else "start_up" for name in self._pools}

    # What a record changes.

    def _begin(self, facts: Mapping[str, Any]) -> None:
        self._downstream = {role: tuple(consumers) for role, consumers in facts["graph"].items()}
        self._upstream = {
            role: tuple(a for a, consumers in self._downstream.items() if role in consumers)
            for role in self._downstream
        }
        # Leave to draw prompts comes with a publication.
        self._upstream["dataloader"] = ("param_update",)
        self._batches_in_flight = int(facts.get("max_lag", 0)) + 1
        self._startup_s = float(facts.get("startup_s", 0.0))
        for name, pool in facts["pools"].items():
            self._pools[name] = PoolAccount(devices=pool["devices"], roles=tuple(pool["roles"]))
            self._pools[name].seconds["start_up"] = pool["devices"] * self._startup_s
            self._home.update(dict.fromkeys(pool["roles"], name))
            self._holders[name] = {}
            if "generate" in pool["roles"]:
                self._pending[name] = defaultdict(float)

    def _move(self, record: LogRecord) -> None:
        lane = (record.role, int(record.fields.get("lane", 0)))
        assert record.state is not None
        self._lanes[lane] = record.state
        pool = self._home.get(record.role)
        if record.event == "GATED":
            self._gated[lane] = str(record.fields["on"])
        elif record.event == "ITEM" or record.state in _TERMINAL:
            self._gated.pop(lane, None)
        if pool is not None and record.event == "LEASE":
            self._holders[pool][lane] = None
        elif pool is not None and record.event == "RELEASE":
            self._holders[pool].pop(lane, None)

    def _note(self, record: LogRecord) -> None:
        if record.event == "SERVED":
            self._settle(record.fields)
            self._weights_s = sum(
                float(record.fields.get(part, 0.0)) for part in ("gather_s", "transfer_s", "load_s")
            )
            if self._steps and self._warm is None:
                self._warm, self._warm_t = self.account(), record.t
            if not self._serving:
                self._serving, self._steady_from = True, record.t
        elif record.event == "VALIDATED":
            for name in self._pending:
                self._shift(name, float(record.fields["seconds"]) * self._pools[name].devices, "validation")
        elif record.event == "TRAINED":
            tail_s, after_s = (
                float(record.fields.get("batch/tail_s", 0.0)),
                self._step["train"] + self._weights_s,
            )
            self._loop_s += (tail_s + after_s) / self._batches_in_flight
            # Answers that began in the cold took longer for that.
            self._warm_loop_s += (
                (min(tail_s, record.t - self._warm_t) + after_s) / self._batches_in_flight
                if self._warm
                else 0.0
            )
            self._steps.append(StepAccount(step=int(record.fields["step"]), seconds=dict(self._step)))
            self._step = defaultdict(float)

    # Passing time.

    def _pass(self, seconds: float) -> None:
        if seconds <= 0:
            return
        for name, pool in self._pools.items():
            reason = self._reason(name) if self._serving else "start_up"
            account = pool.seconds if name not in self._pending or not self._serving else self._pending[name]
            account[reason] += seconds * pool.devices
        if self._serving:
            self._step[self._trains_or_waits_for()] += seconds

    def _reason(self, pool: str) -> str:
        holders = self._holders[pool]
        running = next((role for role, lane in holders if self._lanes[role, lane] == "RUNNING"), None)
        if running is not None:
            return "sync" if running == "param_update" else f"compute_{running}"
        if holders:
            return f"lease_{next(iter(holders))[0]}"
        blamed = self._blame(self._pools[pool].roles)
        return "none" if blamed is None else f"wait_{blamed}"

    def _trains_or_waits_for(self) -> str:
        holders = self._holders.get(self._home.get("train", ""), {})
        if any(role == "train" and self._lanes[role, lane] == "RUNNING" for role, lane in holders):
            return "train"
        return self._blame(["train"]) or "none"

    def _blame(self, roles: Sequence[str]) -> str | None:
        """The nearest role that computes, going back along what each of these waits for."""
        seen, frontier = set(roles), list(roles)
        while frontier:
            found: list[str] = []
            for role in frontier:
                for before in self._waits_for(role):
                    if self._is_running(before) and before not in roles:
                        return before
                    if before not in seen:
                        seen.add(before)
                        found.append(before)
            frontier = found
        return next((role for role in roles if self._is_running(role)), None)

    def _waits_for(self, role: str) -> tuple[str, ...]:
        lanes = [(lane, state) for lane, state in self._lanes.items() if lane[0] == role]
        states = {state for _, state in lanes}
        gates = tuple(self._gated[lane] for lane, _ in lanes if lane in self._gated)
        if gates:
            return gates
        if "WAITING_RESOURCE" in states:
            # A role without devices is here between two records of its own.
            return tuple(holder for holder, _ in self._holders.get(self._home.get(role, ""), {}))
        if "WAITING_OUTPUT" in states:
            return self._downstream.get(role, ())
        return self._upstream.get(role, ()) if "WAITING_INPUT" in states else ()

    def _is_running(self, role: str) -> bool:
        return any(state == "RUNNING" for (name, _), state in self._lanes.items() if name == role)

    # What the servers say afterwards.

    def _settle(self, facts: Mapping[str, Any]) -> None:
        """The seconds since the last version: how long requests were open, how long the servers stood
        still.
        """
        for name, pending in self._pending.items():
            each = self._pools[name].devices / max(1, int(facts["replicas"]))
            stalled = float(facts["stall_s"]) * each
            self._shift(name, stalled, "sync", since="compute_generate")
            open_s = max(0.0, float(facts["busy_s"]) * each - stalled - pending.get("validation", 0.0))
            idle = pending["compute_generate"] - open_s
            if idle > 0:
                self._shift(name, idle, "wait_environment", since="compute_generate")
            self._pools[name].seconds = sum_by_reason(self._pools[name].seconds, pending)
            pending.clear()

    def _shift(self, pool: str, amount: float, to: str, since: str | None = None) -> None:
        """Give pending seconds another reason: first those of `since` (default: of generation), then
        others of waiting.
        """
        pending = self._pending[pool]
        sources = (
            [since] if since else ["compute_generate", *sorted(r for r in pending if r.startswith("wait_"))]
        )
        for source in sources:
            moved = min(amount, pending[source])
            if moved > 0:
                pending[source] -= moved
                pending[to] += moved
                amount -= moved


def account(records: Iterable[LogRecord]) -> Accounting:
    """The account of a whole log. Raises AccountingError: it does not add up."""
    accountant = Accountant()
    for record in records:
        accountant(record)
    return accountant.account()
