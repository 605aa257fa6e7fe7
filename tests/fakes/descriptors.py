# SPDX-License-Identifier: Apache-2.0
"""The pipes and sockets that a test opens, and which of them are open. Others of the process do not count."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any

import pytest


class Descriptors:
    """Records each end of the pipes and socket pairs that this process makes from now on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: set[str] = set()
        monkeypatch.setattr(os, "pipe", self._recording(os.pipe))
        monkeypatch.setattr(socket, "socketpair", self._recording(socket.socketpair))

    def _recording(self, make: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
        @wraps(make)
        def recorded(*arguments: Any) -> tuple[Any, Any]:
            ends = make(*arguments)
            for end in ends:
                number = end if isinstance(end, int) else end.fileno()
                # The kernel gives a number again, but not this name.
                self.made.add(os.readlink(f"/proc/self/fd/{number}"))
            return ends

        return recorded

    def still_open(self) -> set[str]:
        """Return the names of those that this process has not closed."""
        names = set()
        for number in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                names.add(os.readlink(f"/proc/self/fd/{number}"))
        return self.made & names
