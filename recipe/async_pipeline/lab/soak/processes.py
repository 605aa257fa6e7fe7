# SPDX-License-Identifier: Apache-2.0
"""The processes of a run, found by an environment variable that all of them inherit."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import NamedTuple


class LiveProcess(NamedTuple):
    """A process that is alive."""

    pid: int
    command: str


def processes_with(name: str, value: str) -> list[LiveProcess]:
    """Return the live processes, among those readable by this user, with the environment variable set."""
    wanted = f"{name}={value}".encode()
    found = []

    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes().split(b"\0")
                text = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if state != "Z" and wanted in environment:
                found.append(LiveProcess(int(entry.name), text))
    return found


def send(pid: int, signal_number: signal.Signals) -> bool:
    """Send a signal; return False if the process is gone."""
    try:
        os.kill(pid, signal_number)
    except ProcessLookupError:
        return False
    return True
