# SPDX-License-Identifier: Apache-2.0
"""What a group of training ranks must offer to fill an arena."""

from __future__ import annotations

from typing import Protocol, TypeVar

T = TypeVar("T")


class HostRanks(Protocol):
    """The training ranks of one host, which fill an arena together. Rank 0 of them owns it."""

    rank: int
    hosts: int
    """Number of hosts with training ranks."""

    def share(self, value: T) -> T:
        """Return rank 0's value. A collective."""

    def all(self, value: T) -> list[T]:
        """Return the values of all ranks of this host, by rank. A collective."""

    def barrier(self) -> None:
        """Wait for all ranks of this host."""


class Alone:
    """A single rank."""

    rank = 0
    hosts = 1

    def share(self, value: T) -> T:
        return value

    def all(self, value: T) -> list[T]:
        return [value]

    def barrier(self) -> None:
        pass
