# SPDX-License-Identifier: Apache-2.0
"""One simulated run: `AsyncTrainingFlow` unchanged, on a loop of virtual time, and its figures.

A `core.schedule.Schedule` decides about order and age, as in a real run.
"""

from __future__ import annotations

import asyncio
import gc
import math
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from types import FrameType
from typing import Any

from ....core.events import LogRecord
from ....core.flow import AsyncTrainingFlow
from ....core.waits.clock import run_virtual
from ....errors import ConfigError
from ....observe.account.accountant import Accountant
from ....observe.account.accounting import Accounting
from .trainer import Setting, SimulatedTrainer

LEAST_STEPS = 4
"""Smallest number of steps to average over."""


@dataclass(frozen=True, kw_only=True)
class SimulatedRun:
    """The figures of a simulated run; times are virtual, except `wall_s`."""

    setting: Setting
    step_s: float
    """Mean over the steps of the window."""
    step_ends_s: tuple[float, ...]
    """End of every step that was simulated."""
    lag_mean: float
    """Mean lag of the window's trajectories."""
    lag_max: int
    """Largest lag of the simulated steps."""
    accounting: Accounting
    """Device-seconds of the simulated steps."""
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


def whole_rounds(steps: int, max_lag: int) -> int:
    """Return the largest number of steps up to `steps` that can be averaged over, or the smallest one.

    It is a multiple of `max_lag` + 1: a pipeline admits so many batches at once and may train them in bursts,
    of which a window of another length has too few slow steps or too many.
    """
    burst = max_lag + 1
    return max(steps // burst, -(-LEAST_STEPS // burst)) * burst


def window(steps: int, max_lag: int) -> tuple[int, int]:
    """Return the steps after and until which to average, without filling and draining the pipeline.

    Raises ConfigError if too few steps remain.
    """
    first, free = 2 * (max_lag + 1), steps - 3 * (max_lag + 1)
    measured = whole_rounds(free, max_lag)
    if measured > free:
        raise ConfigError(
            f"--steps must be at least {steps - free + measured} with max_lag {max_lag}, got {steps}; raise "
            "it"
        )
    return first, first + measured


class TooSlow(Exception):
    """A simulation was given up: its steps take longer than the limit."""


def simulate(
    setting: Setting, over: tuple[int, int] | None = None, slowest_s: float = math.inf
) -> SimulatedRun:
    """Run a simulation; average over the window.

    With `over` (first, last), average over these steps and end with the last of them: batches in flight after
    it are not finished.

    Raises ConfigError if there are too few steps for the lag, and TooSlow as soon as it is certain that the
    mean step takes more than `slowest_s`; errors of the flow propagate.
    """
    first, last = over or window(setting.steps, setting.knobs.staleness.max_lag)
    trainer = SimulatedTrainer(setting)
    flow = AsyncTrainingFlow(trainer, keep_records=1)
    accountant = Accountant()
    steps = _Steps(first, last if over else None, slowest_s * (last - first))
    flow.log.subscribe(accountant)
    flow.log.subscribe(steps)

    started = time.perf_counter()
    with _collecting_seldom():
        _run_unless_interrupted(steps.run(flow, trainer))
    if len(steps.ends_s) < last:
        raise TooSlow

    return SimulatedRun(
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
    """Subscriber of the event log: the end of each step, and the lag of its trajectories.

    It can end the run before all steps are trained.
    """

    def __init__(self, first: int, last: int | None, limit_s: float) -> None:
        """End the run with step `last`, and `limit_s` after the end of step `first` at the latest."""
        self.ends_s: list[float] = []
        self.lags: list[float] = []
        self.records = 0
        self._first, self._last, self._limit_s = first, last, limit_s
        self._end: Callable[[], None] = lambda: None
        self._ended = False

    def __call__(self, record: LogRecord) -> None:
        self.records += 1
        if self._ended or record.event != "TRAINED":
            return
        self.ends_s.append(record.t)
        self.lags.append(float(record.fields["lag/mean"]))
        if len(self.ends_s) == self._last:
            self._end()
        elif len(self.ends_s) == self._first and self._limit_s < math.inf:
            asyncio.get_running_loop().call_later(self._limit_s, self._end)

    async def run(self, flow: AsyncTrainingFlow, trainer: SimulatedTrainer) -> None:
        """Run a flow to the end of the last step or until the limit."""
        task = asyncio.current_task()
        assert task is not None

        def end() -> None:
            self._ended = True
            trainer.end()
            task.cancel()

        self._end = end
        try:
            await flow.run()
        except asyncio.CancelledError:
            if not self._ended:
                raise


def _run_unless_interrupted(coro: Coroutine[Any, Any, object]) -> None:
    """Run a coroutine in virtual time; Ctrl-C and SIGTERM cancel it and then have their usual effect.

    A handler that raises would raise between any two instructions, also where a coroutine has been made but
    is not awaited yet.
    """
    if threading.current_thread() is not threading.main_thread():
        run_virtual(coro)
        return
    usual = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    caught: list[tuple[int, FrameType | None]] = []

    async def run() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def note(number: int, frame: FrameType | None) -> None:
            caught.append((number, frame))
            loop.call_soon(task.cancel)

        for number, handler in usual.items():
            if callable(handler):
                signal.signal(number, note)
        await coro

    try:
        run_virtual(run())
    except asyncio.CancelledError:
        if not caught:
            raise
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
    for caught_number, frame in caught[:1]:
        handler = usual[signal.Signals(caught_number)]
        assert callable(handler)
        handler(caught_number, frame)


@contextmanager
def _collecting_seldom() -> Iterator[None]:
    """Collect garbage less often: a simulation makes millions of objects, none in cycles."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, 50, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)
