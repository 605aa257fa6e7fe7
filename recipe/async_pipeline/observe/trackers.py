# SPDX-License-Identifier: Apache-2.0
"""Send metrics to trackers that may fail, answer late or hang, without holding up the run.

    deliver ──► the thread of that tracker ──► done
                    ├─► it raises: the same call again, after longer and longer pauses
                    └─► ATTEMPTS failures in a row, or STUCK_S in one call: switched off, as an observer

Calls stay in order. The caller waits for its call, as long as the service keeps up.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from ..core.groups.bad_data import is_round
from ..core.waits.retry import Retry
from .observers import Observers, short_text

PATIENCE_S = 20.0
"""Seconds that a caller waits for its call."""
ATTEMPTS = 12
RETRY_S, LONGEST_RETRY_S = 5.0, 300.0
"""Seconds until a failed call is repeated, at first and at most: half an hour until it is given up."""
STUCK_S = 1800.0
"""Seconds in one call after which a service is switched off."""
KEPT_CALLS = 10_000
"""Calls that wait for a service; it is switched off when there are more."""
CLOSE_S = 30.0
"""Seconds for the calls that are left at the end of a run."""


class ServiceCalls:
    """Calls of one service, in order, in a thread that may hang. May be called from any thread."""

    def __init__(
        self,
        name: str,
        observers: Observers,
        *,
        lost: str,
        patience_s: float = PATIENCE_S,
        stuck_s: float = STUCK_S,
        retry: Retry | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`lost` says what the run lacks once the service is switched off."""
        self._name, self._observers, self._lost = name, observers, lost
        self._patience_s, self._stuck_s, self._now = patience_s, stuck_s, now
        self._retry = retry or Retry(limit=ATTEMPTS, first=RETRY_S, longest=LONGEST_RETRY_S)
        self._calls: deque[Callable[[], object]] = deque()
        self._done = 0
        self._given = 0
        self._began = math.inf
        """When the present call began."""
        self._closing = self._is_over = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def __call__(self, call: Callable[[], object]) -> None:
        """Deliver a call. Returns once it is done, or after `patience_s`, or at once if an earlier one is not
        done yet.

        Raises its error if the observers are strict.
        """
        if self._observers.strict:
            call()
            return
        with self._changed:
            if self._is_over:
                return
            if self._now() - self._began > self._stuck_s:
                self._switch_off(TimeoutError(f"no answer for {self._stuck_s:g} s"))
                return
            if len(self._calls) >= KEPT_CALLS:
                self._switch_off(TimeoutError(f"{KEPT_CALLS} calls wait"))
                return
            self._calls.append(call)
            self._given += 1
            number = self._given
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            if len(self._calls) == 1:
                self._changed.wait_for(
                    lambda: self._done >= number or self._is_over or self._retry.in_a_row > 0,
                    self._patience_s,
                )

    def close(self, timeout_s: float = CLOSE_S, last: Callable[[], object] | None = None) -> None:
        """Try the calls that are left again, then call `last`, for at most so many seconds."""
        with self._changed:
            if last is not None and self._thread is not None and not self._closing:
                self._calls.append(last)
            self._closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._calls or self._is_over, timeout_s)
            if self._calls and not self._is_over:
                self._switch_off(TimeoutError(f"{len(self._calls)} calls were left at the end"))

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._calls or self._closing)
                if not self._calls or self._is_over:
                    return
                call, self._began = self._calls[0], self._now()
            error: Exception | None = None
            try:
                call()
            except Exception as raised:  # noqa: BLE001 - trackers and callbacks are code of others
                error = raised
            with self._changed:
                self._began = math.inf
                if self._is_over:
                    return
                if error is None:
                    self._calls.popleft()
                    self._done += 1
                    self._works()
                elif not self._retry.failed(self._now()) or self._closing:
                    self._switch_off(error)
                else:
                    self._fails(error)
                self._changed.notify_all()

    def _works(self) -> None:
        if self._retry.in_a_row and is_round(self._retry.total):
            self._observers.say(f"{self._name} works again")
        self._retry.succeeded()

    def _fails(self, error: Exception) -> None:
        """Tell the user about the first failure in a row, and wait until the call may be repeated."""
        if self._retry.in_a_row == 1 and is_round(self._retry.total):
            self._observers.say(
                f"{self._name} fails: {short_text(error)}; it is tried again, and switched off after "
                f"{self._retry.limit} failures in a row"
            )
        self._changed.notify_all()
        self._changed.wait_for(lambda: self._closing, self._retry.due - self._now())

    def _switch_off(self, error: Exception) -> None:
        self._is_over = True
        self._calls.clear()
        self._observers.failed(self._name, error, lost=self._lost)
        self._changed.notify_all()


class TrackingLogger(Protocol):
    """verl's `Tracking`."""

    @property
    def logger(self) -> Mapping[str, Any]:
        """The trackers, by name."""

    def log(self, *, data: Mapping[str, Any], step: int) -> object:
        """Log metrics."""

    def finish(self) -> object:
        """End what it began."""


class Trackers:
    """The trackers of a run: each has its own thread, so that none hides metrics from the others.

    It is opened, called and finished in that thread, because some trackers keep their run for each thread.
    """

    def __init__(
        self,
        names: Sequence[str],
        connect: Callable[[str], TrackingLogger],
        samples: Any,
        observers: Observers,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """`connect(name)` opens a tracker; `samples` is verl's logger of generations in validation."""
        self._connect, self._samples = connect, samples
        self._open: dict[str, TrackingLogger] = {}
        self._calls_of = {
            name: ServiceCalls(
                f"the tracker {name}", observers, lost="without its later metrics", patience_s=patience_s
            )
            for name in names
        }
        for name, deliver in self._calls_of.items():
            deliver(partial(self._begin, name))

    def _begin(self, name: str) -> None:
        opened = self._connect(name)
        if not opened.logger:  # verl only warns about some errors
            raise ConnectionError("it could not be opened")
        self._open[name] = opened

    def _log(self, name: str, metrics: Mapping[str, Any], step: int) -> None:
        self._open[name].log(data=metrics, step=step)

    def _finish(self, name: str) -> None:
        self._open[name].finish()

    def log_metrics(self, metrics: Mapping[str, Any], step: int, only: Collection[str] | None = None) -> None:
        """Log metrics to each tracker, or to some."""
        for name in self._calls_of if only is None else only:
            self._calls_of[name](partial(self._log, name, metrics, step))

    def log(self, loggers: Sequence[str], samples: Sequence[Any], step: int) -> None:
        """Log generations of a validation, as verl calls it: `loggers` are names of trackers."""
        for name in loggers:
            if name in self._calls_of:
                self._calls_of[name](partial(self._samples.log, [name], samples, step))

    def close(self) -> None:
        """Send what is left, for at most CLOSE_S. Blocks."""
        end = time.monotonic() + CLOSE_S
        for name, deliver in self._calls_of.items():
            deliver.close(max(0.0, end - time.monotonic()), partial(self._finish, name))
