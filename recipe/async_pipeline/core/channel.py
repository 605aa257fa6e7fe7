# SPDX-License-Identifier: Apache-2.0
"""Edges of the pipeline: bounded, closeable, lossless, first in first out.

    producers ── send ──►  [ capacity ]  ── receive ──► consumers
                 waits while full           waits while empty
                 raises once closed         raises once closed *and* drained

asyncio.Queue cannot be closed before Python 3.13, and lets a later task overtake a waiter that was woken.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

from ..errors import ChannelClosed
from .waits.wait_queue import Turnstile

T = TypeVar("T")


class Channel(Generic[T]):
    """A queue between tasks of one event loop; each item is received exactly once.

    Waiting senders are served in the order of their calls, and so are waiting receivers. A send or
    receive that is cancelled has no effect: the item was not sent, or stays for the next receiver.
    """

    def __init__(self, name: str, capacity: int, producers: int = 1) -> None:
        if capacity < 1:
            raise ValueError(f"channel {name!r}: capacity must be >= 1, got {capacity}")
        if producers < 1:
            raise ValueError(f"channel {name!r}: producers must be >= 1, got {producers}")
        self._name = name
        self._capacity = capacity
        self._producers = producers
        self._open_producers = producers
        self._closed = False
        self._items: deque[T] = deque()
        self._senders = Turnstile(self._senders_that_may_pass)
        self._receivers = Turnstile(self._receivers_that_may_pass)

    @property
    def name(self) -> str:
        return self._name

    @property
    def capacity(self) -> int:
        """The most items that are ever inside."""
        return self._capacity

    @property
    def closed(self) -> bool:
        """Whether sending has ended; items may still be inside."""
        return self._closed

    def __len__(self) -> int:
        """Return the number of items inside."""
        return len(self._items)

    def __bool__(self) -> bool:
        """Return True even if empty: `if channel` tests for the channel, not for its items."""
        return True

    async def send(self, item: T) -> None:
        """Put an item in.

        Waits for: room, behind every earlier sender. Unblocked by: receive, close or abort. Raises
        ChannelClosed if the channel is closed or closes during the wait; the item is not inside then.
        """
        await self._senders.turn()
        if self._closed:
            raise ChannelClosed(f"channel {self._name!r} is closed; nothing more can be sent")
        self._items.append(item)
        self._receivers.wake()

    async def receive(self) -> T:
        """Take the oldest item out.

        Waits for: an item, behind every earlier receiver. Unblocked by: send, close or abort. Raises
        ChannelClosed if the channel is closed and empty.
        """
        await self._receivers.turn()
        if not self._items:
            raise ChannelClosed(f"channel {self._name!r} is closed and drained")
        item = self._items.popleft()
        self._senders.wake()
        return item

    def __aiter__(self) -> AsyncIterator[T]:
        """Receive until the channel is closed and drained."""
        return self

    async def __anext__(self) -> T:
        try:
            return await self.receive()
        except ChannelClosed:
            raise StopAsyncIteration from None

    def close(self) -> None:
        """Count one producer as done; the last one closes the channel.

        Each producer calls this once, after its last send has returned. A send that still waits at
        that moment raises ChannelClosed. Raises ChannelClosed if it is called more often than there
        are producers.
        """
        if self._open_producers == 0:
            raise ChannelClosed(
                f"channel {self._name!r} is closed: each of its {self._producers} producers closed it before"
            )
        self._open_producers -= 1
        if self._open_producers == 0:
            self.abort()

    def abort(self) -> None:
        """Close at once for all producers; items inside can still be received. Idempotent."""
        self._closed = True
        self._senders.wake()
        self._receivers.wake()

    def _senders_that_may_pass(self) -> int:
        return sys.maxsize if self._closed else self._capacity - len(self._items)

    def _receivers_that_may_pass(self) -> int:
        return sys.maxsize if self._closed else len(self._items)
