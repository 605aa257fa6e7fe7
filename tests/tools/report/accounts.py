# SPDX-License-Identifier: Apache-2.0
"""Runs with given device-seconds, as input for the advice."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipe.async_pipeline.core.lag.bound import LoopCosts
from recipe.async_pipeline.observe.account.accounting import Accounting, PoolAccount, StepAccount
from recipe.async_pipeline.tools.report.advice_model import Facts, facts_of
from recipe.async_pipeline.tools.report.figures.data import RunData

STEPS = 10
Pools = Mapping[str, tuple[int, Mapping[str, float]]]
HOMES = {"train": ("logp", "ref_logp", "train", "param_update"), "generate": ("generate",)}


def run_of(
    pools: Pools,
    *,
    loop_s: float = 0.0,
    max_lag: int = 1,
    trainer: Mapping[str, float] | None = None,
    steps: int = STEPS,
    start_up_s: float = 0.0,
    **known: Any,
) -> RunData:
    """Return a run of 100 s since the first version; `pools` has the devices and seconds of each pool.

    The remaining seconds of a pool have the reason `none`.
    """
    accounts = {}
    for name, (devices, seconds) in pools.items():
        account = PoolAccount(devices=devices, roles=HOMES.get(name, (name,)))
        account.seconds.update(seconds)
        account.seconds["none"] += devices * 100.0 - sum(seconds.values())
        account.seconds["start_up"] += devices * start_up_s
        assert account.seconds["none"] >= 0, "more device-seconds than have passed"
        accounts[name] = account

    each = {
        role: share * 100.0 / max(1, steps)
        for role, share in (trainer or {"train": 0.6, "generate": 0.4}).items()
    }

    found = Accounting(
        wall_s=100.0 + start_up_s,
        pools=accounts,
        steps=[StepAccount(step=n + 1, seconds=each) for n in range(steps)],
        steady_s=100.0,
        max_lag=max_lag,
        loop=LoopCosts(tail_s=loop_s * (max_lag + 1)),
    )
    found.check()

    home = {role: pool for pool, account in accounts.items() for role in account.roles}
    facts: dict[str, Any] = {
        "name": "a/run",
        "path": Path("run"),
        "status": "completed",
        "strategy": "one_step_off",
        "steps": steps,
        "wall_s": 100.0,
    }
    facts |= {
        "max_lag": max_lag,
        "step_s": [100.0 / max(1, steps)] * steps,
        "samples_per_s": 10.0,
        "accounting": found,
        "home": home,
    }
    return RunData(**(facts | known))


def facts_for(*args: Any, **kwargs: Any) -> Facts:
    facts = facts_of(run_of(*args, **kwargs))
    assert facts is not None
    return facts


def work(train: float, generate: float, *, devices: tuple[int, int] = (4, 4), **more: float) -> Pools:
    """Return pools with the given work, as shares of each pool's time."""
    return {
        "train": (devices[0], {"compute_train": train * devices[0] * 100, **more}),
        "generate": (devices[1], {"compute_generate": generate * devices[1] * 100}),
    }
