# SPDX-License-Identifier: Apache-2.0
"""Measure how late an event loop runs its timers, and how much its own thread, or process, has caused."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from ...tables import percentile

EVERY_S = 0.005
"""Seconds between two samples of an idle loop."""
BUCKET_S = 1e-4
"""Resolution in seconds."""


class LagMeter:
    """Samples the event loop that it runs on.

    A blocked loop takes no samples. So that a long block counts as much as it lasts, a sample with lag L
    stands for all samples of its time: L, L - EVERY_S, L - 2 EVERY_S, ...
    """

    def __init__(self, cpu_s: Callable[[], float] = time.thread_time) -> None:
        """`cpu_s`: the CPU time that explains a lag."""
        self._cpu_s = cpu_s
        self._lags: dict[float, int] = {}
        """Number of samples by lag, in units of `BUCKET_S`."""
        self._own: dict[float, int] = {}
        """The same for the part of each lag that the CPU time explains."""

    async def run(self) -> None:
        """Sample until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due, used = loop.time() + EVERY_S, self._cpu_s()
            await asyncio.sleep(EVERY_S)
            self.note(max(0.0, loop.time() - due), self._cpu_s() - used)

    def note(self, lag_s: float, cpu_s: float) -> None:
        """Add a sample: how late the timer was, and the CPU time since the last sample."""
        for counts, lag in ((self._lags, lag_s), (self._own, min(lag_s, cpu_s))):
            while True:
                bucket = round(lag / BUCKET_S)
                counts[bucket] = counts.get(bucket, 0) + 1
                lag -= EVERY_S
                if lag <= 0:
                    break

    def summary(self) -> dict[str, float]:
        """Return percentiles in seconds."""
        found = {}
        for name, counts in (("", self._lags), ("own_", self._own)):
            for label, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
                found[f"{name}{label}"] = BUCKET_S * (percentile(counts, share) or 0.0)
        return found
