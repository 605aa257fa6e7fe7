# SPDX-License-Identifier: Apache-2.0
"""What a test has open. Other descriptors of the process do not count: they close at any time."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

import pytest


class Descriptors:
    """Records each end of the pipes and socket pairs that this process makes later."""

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
        """Return the names of the recorded ends that are open."""
        return self.made.intersection(_open())


def open_below(folder: Path) -> list[str]:
    """Return the files and folders below a folder that this process has open, also deleted ones."""
    return [name for name in _open() if name.startswith(f"{folder}/")]


def _open() -> list[str]:
    names = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            names.append(os.readlink(f"/proc/self/fd/{number}"))
    return names
