# SPDX-License-Identifier: Apache-2.0
"""Account for every device-second of a run from its event log; `accounting` lists the reasons.

The rollout's servers report when they next load a version how long they had open requests and how long they
paused. Until then the seconds of their pool are pending and counted as the stages saw them.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..core.events import LogRecord
from ..core.state_machine import TERMINAL
from .accounting import Accounting, PoolAccount, Seconds, StepAccount, sum_by_reason

_TERMINAL = {state.name for state in TERMINAL}


class Accountant:
    """A subscriber of the event log that keeps the account current, with a few additions per record."""

    def __init__(self, *, keep_steps: int | None = None) -> None:
        """`keep_steps` bounds the number of steps of the account; None keeps all."""
        self._pools: dict[str, PoolAccount] = {}
        self._home: dict[str, str] = {}
        """Stage to pool."""
        self._upstream: dict[str, tuple[str, ...]] = {}
        self._downstream: dict[str, tuple[str, ...]] = {}

        self._lanes: dict[tuple[str, int], str] = {}
        self._gated: dict[tuple[str, int], str] = {}
        self._holders: dict[str, dict[tuple[str, int], None]] = {}
        self._pending: dict[str, Seconds] = {}
        """Seconds of the rollout's pool since its servers last reported."""

        self._steps: deque[StepAccount] = deque(maxlen=keep_steps)
        self._step: Seconds = defaultdict(float)
        self._batches_in_flight = 1
        self._loop_s = 0.0
        """Loop bound of all steps."""
        self._weights_s = 0.0
        """Duration of the last weight update."""

        self._startup_s = self._steady_from = self._now = 0.0
        self._serving = False
        self._warm: Accounting | None = None
        """The account at the moment when the run became warm."""
        self._warm_t = 0.0
        self._warm_loop_s = 0.0
        """Loop bound of the steps since then."""

    def __call__(self, record: LogRecord) -> None:
        if record.event == "START" and record.role == "flow":
            self._begin(record.fields)
        self._advance(record.t - self._now)
        self._now = record.t
        self._record_fact(record)
        if record.state is not None and record.role != "flow":
            self._change_state(record)

    def account(self) -> Accounting:
        """Return the account up to the last record. Raises AccountingError if it does not add up."""
        pools = {
            name: PoolAccount(
                devices=p.devices,
                roles=p.roles,
                seconds=sum_by_reason(p.seconds, self._pending.get(name, {})),
                changes=p.changes,
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
        """Return the account since the weight update after the first step, or None before it.

        By then code is compiled and caches are full. Raises AccountingError if it does not add up.
        """
        return None if self._warm is None else self.account().after(self._warm, self._warm_loop_s)

    @property
    def last_step(self) -> StepAccount | None:
        """The account of the last optimizer step, or None before the first."""
        return self._steps[-1] if self._steps else None

    def settled(self) -> dict[str, Seconds]:
        """Return the device-seconds by pool and reason that are final."""
        return {name: sum_by_reason(pool.seconds) for name, pool in self._pools.items()}

    def doing(self) -> dict[str, str]:
        """Return what each pool does since the last record, as the stages see it."""
        return {name: self._reason(name) if self._serving else "start_up" for name in self._pools}

    # Record by record.

    def _begin(self, facts: Mapping[str, Any]) -> None:
        self._downstream = {role: tuple(consumers) for role, consumers in facts["graph"].items()}
        self._upstream = {
            role: tuple(a for a, consumers in self._downstream.items() if role in consumers)
            for role in self._downstream
        }
        # Prompts are admitted by weight updates.
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

    def _change_state(self, record: LogRecord) -> None:
        lane = (record.role, int(record.fields.get("lane", 0)))
        assert record.state is not None
        self._lanes[lane] = record.state

        if record.event == "GATED":
            self._gated[lane] = str(record.fields["on"])
        elif record.event == "ITEM" or record.state in _TERMINAL:
            self._gated.pop(lane, None)

        pool = self._home.get(record.role)
        if pool is not None and record.event == "LEASE":
            self._holders[pool][lane] = None
        elif pool is not None and record.event == "RELEASE":
            self._holders[pool].pop(lane, None)

    def _record_fact(self, record: LogRecord) -> None:
        if record.event == "SERVED":
            self._settle(record.fields)
            self._weights_s = update_s(record.fields)
            if self._steps and self._warm is None:
                self._warm, self._warm_t = self.account(), record.t
            if not self._serving:
                self._serving, self._steady_from = True, record.t
        elif record.event == "VALIDATED":
            for name in self._pending:
                self._shift(name, float(record.fields["seconds"]) * self._pools[name].devices, "validation")
        elif record.event == "TRAINED":
            self._finish_step(record)
        elif record.event == "RESIZED":
            pool = self._pools[str(record.fields["pool"])]
            added = int(record.fields["devices"]) - pool.devices
            pool.devices += added
            pool.changes = (*pool.changes, (self._startup_s + record.t, added))

    def _finish_step(self, record: LogRecord) -> None:
        tail_s = float(record.fields.get("batch/tail_s", 0.0))
        after_s = self._step["train"] + self._weights_s
        self._loop_s += (tail_s + after_s) / self._batches_in_flight
        if self._warm:
            # A response that began before the run was warm took longer; count only its warm part.
            warm_tail_s = min(tail_s, record.t - self._warm_t)
            self._warm_loop_s += (warm_tail_s + after_s) / self._batches_in_flight

        self._steps.append(StepAccount(step=int(record.fields["step"]), seconds=dict(self._step)))
        self._step = defaultdict(float)

    # The passing of time.

    def _advance(self, seconds: float) -> None:
        if seconds <= 0:
            return
        for name, pool in self._pools.items():
            reason = self._reason(name) if self._serving else "start_up"
            account = pool.seconds if name not in self._pending or not self._serving else self._pending[name]
            account[reason] += seconds * pool.devices
        if self._serving:
            self._step[self._trained_or_awaited()] += seconds

    def _reason(self, pool: str) -> str:
        holders = self._holders[pool]
        running = next((role for role, lane in holders if self._lanes[role, lane] == "RUNNING"), None)
        if running is not None:
            return "sync" if running == "param_update" else f"compute_{running}"
        if holders:
            return f"lease_{next(iter(holders))[0]}"
        awaited = self._nearest_running(self._pools[pool].roles)
        return "none" if awaited is None else f"wait_{awaited}"

    def _trained_or_awaited(self) -> str:
        """Return `train` while the trainer computes, otherwise the stage that it waits for, or `none`."""
        holders = self._holders.get(self._home.get("train", ""), {})
        if any(role == "train" and self._lanes[role, lane] == "RUNNING" for role, lane in holders):
            return "train"
        return self._nearest_running(["train"]) or "none"

    def _nearest_running(self, roles: Sequence[str]) -> str | None:
        """Return the nearest running stage that these stages wait for, or None. Searches breadth first."""
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
        """Return the stages that this stage waits for; none if it computes or has ended."""
        lanes = [(lane, state) for lane, state in self._lanes.items() if lane[0] == role]
        states = {state for _, state in lanes}
        gates = tuple(self._gated[lane] for lane, _ in lanes if lane in self._gated)

        if gates:
            return gates
        if "WAITING_RESOURCE" in states:
            # A stage without devices passes through this state between two consecutive records.
            return tuple(holder for holder, _ in self._holders.get(self._home.get(role, ""), {}))
        if "WAITING_OUTPUT" in states:
            return self._downstream.get(role, ())
        return self._upstream.get(role, ()) if "WAITING_INPUT" in states else ()

    def _is_running(self, role: str) -> bool:
        return any(state == "RUNNING" for (name, _), state in self._lanes.items() if name == role)

    # Corrections once the servers have reported.

    def _settle(self, facts: Mapping[str, Any]) -> None:
        """Correct the seconds since the last version with what the servers measured, and make them final."""
        for name, pending in self._pending.items():
            each = self._pools[name].devices / max(1, int(facts["replicas"]))

            stalled = float(facts["stall_s"]) * each
            self._shift(name, stalled, "sync", source="compute_generate")

            open_s = max(0.0, float(facts["busy_s"]) * each - stalled - pending.get("validation", 0.0))
            idle = pending["compute_generate"] - open_s
            if idle > 0:
                self._shift(name, idle, "wait_environment", source="compute_generate")

            self._pools[name].seconds = sum_by_reason(self._pools[name].seconds, pending)
            pending.clear()

    def _shift(self, pool: str, amount: float, to: str, source: str | None = None) -> None:
        """Move pending seconds to the reason `to`: from `source`, or else from generation, then waiting."""
        pending = self._pending[pool]
        sources = (
            [source] if source else ["compute_generate", *sorted(r for r in pending if r.startswith("wait_"))]
        )

        for reason in sources:
            moved = min(amount, pending[reason])
            if moved > 0:
                pending[reason] -= moved
                pending[to] += moved
                amount -= moved


def account(records: Iterable[LogRecord]) -> Accounting:
    """Return the account of a whole log. Raises AccountingError if it does not add up."""
    accountant = Accountant()
    for record in records:
        accountant(record)
    return accountant.account()


def update_s(facts: Mapping[str, Any]) -> float:
    """Return the seconds of a weight update without waits: gather, preparation, and one commit after another.

    The facts are sums over replicas, which prepare at once.
    """
    load_s = float(facts.get("load_s", 0.0))
    commit_s = float(facts.get("commit_s", 0.0))
    prepare_s = float(facts.get("transfer_s", 0.0)) + load_s - commit_s
    return float(facts.get("gather_s", 0.0)) + prepare_s / max(1, int(facts.get("replicas", 1))) + commit_s
