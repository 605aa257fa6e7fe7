# SPDX-License-Identifier: Apache-2.0
"""Leases on device pools: which stage may compute where, and what it waits for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..errors import LeaseError
from .waits.clock import Clock, LoopClock
from .waits.wait_graph import Holders
from .waits.wait_queue import Turnstile


@dataclass(frozen=True)
class Lease:
    """The right to compute on a pool until it is released."""

    pool: str
    owner: str
    number: int
    """Number of the lease in its pool, from 1."""
    since: float
    """Its start, in seconds of the pool's clock."""


class DevicePool:
    """Devices that at most `slots` leases share at a time; 1 makes a lease exclusive.

    `devices` is the number of accelerators, for accounting; 0 is a pool of CPU work.
    """

    def __init__(self, name: str, devices: int, slots: int = 1, clock: Clock | None = None) -> None:
        if devices < 0:
            raise ValueError(f"pool {name!r}: devices must be >= 0, got {devices}")
        if slots < 1:
            raise ValueError(f"pool {name!r}: slots must be >= 1, got {slots}")
        self._name = name
        self._devices = devices
        self._slots = slots
        self._clock = clock or LoopClock()
        self._leases: dict[int, Lease] = {}
        self._last_number = 0
        self._queue = Turnstile(lambda: self._slots - len(self._leases))

    @property
    def name(self) -> str:
        return self._name

    @property
    def devices(self) -> int:
        """Number of accelerators."""
        return self._devices

    @property
    def slots(self) -> int:
        """The most leases that are ever out at once."""
        return self._slots

    @property
    def holders(self) -> tuple[str, ...]:
        """Owners of the leases that are out, the oldest lease first."""
        return tuple(lease.owner for lease in self._leases.values())

    async def acquire(self, owner: str) -> Lease:
        """Take a lease; the caller must `release` it.

        Waits for: a free slot, behind every earlier owner. Unblocked by: release. If cancelled, it
        holds no lease and passes its turn on.
        """
        await self._queue.turn(owner)
        self._last_number += 1
        lease = Lease(self._name, owner, self._last_number, self._clock.now())
        self._leases[lease.number] = lease
        return lease

    def release(self, lease: Lease) -> None:
        """Release a lease. Raises LeaseError if it was released before or is of another pool."""
        if self._leases.get(lease.number) is lease:
            del self._leases[lease.number]
            self._queue.wake()
            return
        if lease.pool != self._name:
            raise LeaseError(f"{lease.owner} returned a lease on pool {lease.pool!r} to pool {self._name!r}")
        raise LeaseError(
            f"{lease.owner} returned lease {lease.number} on pool {self._name!r}, which is not out: "
            "released before, or not issued by this pool"
        )

    def describe(self) -> Holders:
        """Describe which owners hold the pool and for how long, and which ones wait.

        If the pool is held this reads the clock, which for a LoopClock requires a running loop.
        """
        leases = self._leases.values()
        held = ", ".join(f"{lease.owner} since {self._clock.now() - lease.since:.1f} s" for lease in leases)
        text = f"{self._name}: held by {held}" if held else f"{self._name}: free"
        waiting = ", ".join(self._queue.names)
        return Holders(f"{text}; waiting: {waiting}" if waiting else text, self.holders)


class PoolSet:
    """The pools of a run, by name."""

    def __init__(self, pools: Mapping[str, DevicePool]) -> None:
        self._pools = dict(pools)

    def get(self, name: str) -> DevicePool:
        """Return the pool called `name`. Raises LeaseError, with the known names, if it does not exist."""
        try:
            return self._pools[name]
        except KeyError:
            known = ", ".join(self._pools) or "none"
            raise LeaseError(f"there is no pool {name!r}; known pools: {known}") from None

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names in the order of construction."""
        return iter(self._pools)

    def __len__(self) -> int:
        return len(self._pools)

    def __contains__(self, name: object) -> bool:
        return name in self._pools
