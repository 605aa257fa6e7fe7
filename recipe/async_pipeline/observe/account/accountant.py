# SPDX-License-Identifier: Apache-2.0
"""Account for every device-second of a run from its event log; `accounting` lists the reasons.

The rollout's servers report when they next load a version how long they had open requests and how long they
paused. Until then the seconds of their pool are pending and counted as the stages saw them.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...core.events import LogRecord
from ...core.lag.bound import LoopCosts
from ...core.replay import RunState
from .accounting import Accounting, DeviceSeconds, PoolAccount, StepAccount, is_work, sum_by_reason


class Accountant:
    """A subscriber of the event log that keeps the account current, with a few additions per record."""

    def __init__(self, *, keep_steps: int | None = None) -> None:
        """`keep_steps` bounds the number of steps of the account; None keeps all."""
        self._pools: dict[str, PoolAccount] = {}
        self.state = RunState()
        """The state after the last record."""
        self._pending: dict[str, DeviceSeconds] = {}
        """Seconds of the rollout's pool since its servers last reported."""

        self._steps: deque[StepAccount] = deque(maxlen=keep_steps)
        self._step: DeviceSeconds = defaultdict(float)
        self._max_lag = 0
        self._loop = LoopCosts()
        """Sum over all steps."""
        self._gathered_t: dict[int, float] = {}
        """When each version was gathered that is not served yet."""
        self._weights_s = self._served_t = 0.0
        """Duration and end of the last weight update."""

        self._startup_s = self._steady_from = 0.0
        self._serving = False
        self._warm: Accounting | None = None
        """The account at the moment when the run became warm."""
        self._warm_t = 0.0
        self._warm_loop = LoopCosts()
        """Sum over the steps since then."""

    def __call__(self, record: LogRecord) -> None:
        if record.event == "START" and record.role == "flow":
            self._begin(record.fields)
        self._advance(record.t - self.state.t)
        self.state(record)
        self._record_fact(record)

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
            wall_s=self._startup_s + self.state.t,
            pools=pools,
            steps=tuple(self._steps),
            steady_s=self.state.t - self._steady_from if self._serving else 0.0,
            max_lag=self._max_lag,
            loop=self._loop,
        )
        result.check()
        return result

    def since_warm(self) -> Accounting | None:
        """Return the account since the weight update after the first step, or None before it.

        By then code is compiled and caches are full. Raises AccountingError if it does not add up.
        """
        return None if self._warm is None else self.account().after(self._warm, self._warm_loop)

    @property
    def last_step(self) -> StepAccount | None:
        """The account of the last optimizer step, or None before the first."""
        return self._steps[-1] if self._steps else None

    def settled(self) -> dict[str, DeviceSeconds]:
        """Return the device-seconds by pool and reason that are final."""
        return {name: sum_by_reason(pool.seconds) for name, pool in self._pools.items()}

    def doing(self) -> dict[str, str]:
        """Return what each pool does since the last record, as the stages see it."""
        return {name: self._reason(name) if self._serving else "start_up" for name in self._pools}

    # Record by record.

    def _begin(self, facts: Mapping[str, Any]) -> None:
        self._max_lag = int(facts.get("max_lag", 0))
        self._startup_s = float(facts.get("startup_s", 0.0))

        for name, pool in facts["pools"].items():
            self._pools[name] = PoolAccount(devices=pool["devices"], roles=tuple(pool["roles"]))
            self._pools[name].seconds["start_up"] = pool["devices"] * self._startup_s
            if "generate" in pool["roles"]:
                self._pending[name] = defaultdict(float)

    def _record_fact(self, record: LogRecord) -> None:
        if record.event == "GATHERED":
            self._gathered_t[int(record.fields["version"])] = record.t
        elif record.event == "SERVED":
            self._settle(record.fields)
            began = max(self._served_t, self._gathered_t.pop(int(record.fields["version"]), self._served_t))
            self._weights_s, self._served_t = weights_s(record.fields, record.t - began), record.t
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
        costs = LoopCosts(tail_s=tail_s, update_s=self._step["train"], weights_s=self._weights_s)
        self._loop += costs
        if self._warm:
            # A response that began before the run was warm took longer; count only its warm part.
            self._warm_loop += replace(costs, tail_s=min(tail_s, record.t - self._warm_t))

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
        holders = self.state.leases[pool]
        running = next((lane[0] for lane in holders if self.state.lanes[lane] == "RUNNING"), None)
        if running is not None:
            return "sync" if running == "param_update" else f"compute_{running}"
        if holders:
            return f"lease_{next(iter(holders))[0]}"
        awaited = self._nearest_running(self._pools[pool].roles)
        return "none" if awaited is None else f"wait_{awaited}"

    def _trained_or_awaited(self) -> str:
        """Return `train` while the trainer computes, otherwise the stage that it waits for, or `none`."""
        holders = self.state.leases.get(self.state.home.get("train", ""), {})
        if any(lane[0] == "train" and self.state.lanes[lane] == "RUNNING" for lane in holders):
            return "train"
        return self._nearest_running(["train"]) or "none"

    def _nearest_running(self, roles: Sequence[str]) -> str | None:
        """Return the nearest running stage that these stages wait for, or None. Searches breadth first."""
        seen, frontier = set(roles), list(roles)

        while frontier:
            found: list[str] = []
            lanes = [lane for role in frontier for lane in self.state.lanes_of(role)]
            for before in (role for lane in lanes for role in self.state.awaited_by(lane)):
                if self.state.is_running(before) and before not in roles:
                    return before
                if before not in seen:
                    seen.add(before)
                    found.append(before)
            frontier = found

        return next((role for role in roles if self.state.is_running(role)), None)

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


def weights_s(facts: Mapping[str, Any], took_s: float) -> float:
    """Return the seconds of a weight update without waits: gather, preparation, and the commits.

    The facts are sums over replicas, which prepare at once. The commits follow one another, or as many
    replicas at a time as brought it to `took_s`, the time from the gather until all replicas served it.
    """
    replicas = max(1, int(facts.get("replicas", 1)))
    commit_s = float(facts.get("commit_s", 0.0))
    prepare_s = float(facts.get("transfer_s", 0.0)) + float(facts.get("load_s", 0.0)) - commit_s
    return float(facts.get("gather_s", 0.0)) + min(took_s, prepare_s / replicas + commit_s)


class StepAccountant:
    """A subscriber of the event log that reports metrics once per step.

    The rollout's pool is final only up to its last weight update, so some of its seconds may appear one step
    late. The sum over the run is exact.
    """

    def __init__(self) -> None:
        # The steps would grow with the run; `events.jsonl` has them.
        self._accountant = Accountant(keep_steps=1)
        self._before: Mapping[str, Mapping[str, float]] = {}

    def __call__(self, record: LogRecord) -> None:
        self._accountant(record)

    def take(self) -> dict[str, float]:
        """Return metrics of the time since the last call: device-seconds, and shares of them.

        `overlap_efficiency` covers the run so far.
        """
        now, before = self._accountant.settled(), self._before
        self._before = now

        metrics: dict[str, float] = {}
        worked = passed = 0.0
        for pool, seconds in now.items():
            for reason, total in seconds.items():
                if reason == "start_up":
                    continue
                spent = total - before.get(pool, {}).get(reason, 0.0)
                passed += spent
                worked += spent if is_work(reason) else 0.0
                metrics[f"{'busy' if is_work(reason) else 'idle'}/{pool}/{reason}_s"] = spent

        metrics["bubble_ratio"] = max(0.0, 1 - worked / passed) if passed else 0.0
        metrics["overlap_efficiency"] = self._accountant.account().overlap_efficiency
        return metrics

    def critical_role(self) -> str:
        """Return the stage that took most of the last step, or an empty string before the first step."""
        step = self._accountant.last_step
        return step.critical if step is not None else ""

    def summary(self) -> dict[str, Any]:
        """Return the part for `summary.json`. Raises AccountingError if device-seconds do not add up."""
        return summary_of(self._accountant.account())


def summary_of(account: Accounting) -> dict[str, Any]:
    """Return the device-seconds of each pool by reason, and the figures derived from them."""
    return {
        "bubble_ratio": round(account.bubble_ratio, 4),
        "overlap_efficiency": round(account.overlap_efficiency, 4),
        "device_seconds": {
            name: {
                "devices": pool.devices,
                **{reason: round(s, 3) for reason, s in pool.seconds.items() if s > 0},
            }
            for name, pool in account.pools.items()
        },
    }


ROLES = ("generate", "train")


class OverlapMeter:
    """A subscriber of the event log. A stage computes while any of its lanes is RUNNING."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._state = RunState()
        self._since: float | None = None

    def __call__(self, record: LogRecord) -> None:
        if record.role not in ROLES:
            return
        self._state(record)
        both = all(map(self._state.is_running, ROLES))
        if both and self._since is None:
            self._since = record.t
        elif not both and self._since is not None:
            self.seconds += record.t - self._since
            self._since = None
