# SPDX-License-Identifier: Apache-2.0
"""One simulated run: `AsyncTrainingFlow` unchanged, on a loop of virtual time, and its figures.

A `core.schedule.Schedule` decides about order and age, as in a real run.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean

from ..core.clock import run_virtual
from ..core.events import LogRecord
from ..core.flow import AsyncTrainingFlow
from ..errors import ConfigError
from ..observe.accountant import Accountant
from ..observe.accounting import Accounting
from .trainer import Setting, SimulatedTrainer

LEAST_STEPS = 4
"""Smallest number of steps to average over."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The figures of a simulated run; times are virtual, except `wall_s`."""

    setting: Setting
    step_s: float
    """Mean over the steps of the window."""
    step_ends_s: tuple[float, ...]
    """End of every step."""
    lag_mean: float
    """Mean lag of the window's trajectories."""
    lag_max: int
    """Largest lag of the whole run."""
    accounting: Accounting
    """Device-seconds of the whole run."""
    events: int
    """Log records and events of the engines."""
    wall_s: float

    @property
    def samples_per_s(self) -> float:
        """Trained samples per second of virtual time."""
        return self.setting.groups * self.setting.profile.batch.answers / self.step_s

    @property
    def samples_per_device_s(self) -> float:
        """Trained samples per device-second."""
        return self.samples_per_s / self.setting.placement.devices

    @property
    def idle(self) -> Mapping[str, Mapping[str, float]]:
        """For each pool, the share of its device-seconds by reason for not working."""
        working = ("compute_", "sync", "validation")
        return {
            name: {reason: share for reason, share in pool.shares().items() if not reason.startswith(working)}
            for name, pool in self.accounting.pools.items()
        }


def window(steps: int, max_lag: int) -> tuple[int, int]:
    """Return the steps after and until which to average, without filling and draining the pipeline.

    Raises ConfigError if too few steps remain.
    """
    first, last = 2 * (max_lag + 1), steps - (max_lag + 1)
    if last - first < LEAST_STEPS:
        raise ConfigError(
            f"--steps must be at least {first + max_lag + 1 + LEAST_STEPS} with max_lag {max_lag}, got "
            f"{steps}; raise it"
        )
    return first, last


def simulate(setting: Setting, over: tuple[int, int] | None = None) -> Outcome:
    """Run a simulation; average over `over` (first, last) instead of the window.

    Raises ConfigError if there are too few steps for the lag; errors of the flow propagate.
    """
    first, last = over or window(setting.steps, setting.knobs.staleness.max_lag)
    trainer = SimulatedTrainer(setting)
    flow = AsyncTrainingFlow(trainer, keep_records=1)
    accountant, steps = Accountant(), _Steps()
    flow.log.subscribe(accountant)
    flow.log.subscribe(steps)

    started = time.perf_counter()
    with _collecting_seldom():
        run_virtual(flow.run())

    return Outcome(
        setting=setting,
        step_s=(steps.ends_s[last - 1] - steps.ends_s[first - 1]) / (last - first),
        step_ends_s=tuple(steps.ends_s),
        lag_mean=fmean(steps.lags[first:last]),
        lag_max=flow.ledger.lag_max,
        accounting=accountant.account(),
        events=steps.records + trainer.events,
        wall_s=time.perf_counter() - started,
    )


class _Steps:
    """Subscriber of the event log: the end of each step, and the lag of its trajectories."""

    def __init__(self) -> None:
        self.ends_s: list[float] = []
        self.lags: list[float] = []
        self.records = 0

    def __call__(self, record: LogRecord) -> None:
        self.records += 1
        if record.event == "TRAINED":
            self.ends_s.append(record.t)
            self.lags.append(float(record.fields["lag/mean"]))


@contextmanager
def _collecting_seldom() -> Iterator[None]:
    """Collect garbage less often: a simulation makes millions of objects, none in cycles."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, 50, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)
