# SPDX-License-Identifier: Apache-2.0
"""Process control on Linux: parent-death signals, adoption of orphans, and ending process trees."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

_SET_PDEATHSIG, _SET_NO_NEW_PRIVS = 1, 38
"""Option numbers of Linux's prctl."""


def end_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends. No-op outside Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL)


def gain_no_rights() -> None:
    """Prevent this process and its children from gaining privileges by setuid. No-op outside Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


TERM_S = 5.0
"""Seconds between SIGTERM and SIGKILL."""


KILL_S = 5.0
"""Seconds to wait for killed processes to disappear; one that hangs in the kernel is abandoned."""


_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent dies. No-op outside Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(root: int) -> list[int]:
    """Return the PIDs of all processes below `root`, children before grandchildren."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (parent := _parent(entry)) is not None:
            children.setdefault(parent, []).append(int(entry.name))

    found, queue = [], deque(children.get(root, []))

    while queue:
        pid = queue.popleft()
        found.append(pid)
        queue.extend(children.get(pid, []))

    return found


def end_all(pids: Iterable[int], patience_s: float = TERM_S, *, spared: Collection[int] = ()) -> None:
    """Send SIGTERM to the processes, SIGKILL to the survivors after `patience_s`, and reap them.

    Also kills every other descendant of this process, except for `spared`.
    """
    alive = set(pids)
    for pid in alive:
        send_signal(pid, signal.SIGTERM)

    deadline = time.monotonic() + patience_s
    while alive and time.monotonic() < deadline:
        alive = {pid for pid in alive if _is_alive(pid)}
        time.sleep(0.05)

    # Processes that were started in the meantime are killed as well.
    for pid in {*_others(spared), *alive}:
        send_signal(pid, signal.SIGKILL)

    # A killed process takes a moment to disappear.
    deadline = time.monotonic() + KILL_S
    while (left := _reap_and_list(spared)) and time.monotonic() < deadline:
        for pid in left:
            send_signal(pid, signal.SIGKILL)
        time.sleep(0.01)


def send_signal(pid: int, number: int) -> None:
    """Send a signal to a process; no-op if it is gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _others(spared: Collection[int]) -> list[int]:
    return [pid for pid in descendants(os.getpid()) if pid not in spared]


def _reap_and_list(spared: Collection[int]) -> list[int]:
    """Reap ended children; return the PIDs of the remaining descendants."""
    for pid in _others(spared):
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    return _others(spared)


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def _parent(entry: Path) -> int | None:
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return None
