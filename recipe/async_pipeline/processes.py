# SPDX-License-Identifier: Apache-2.0
"""Process control on Linux: deaths of ancestors, adopted orphans, ends of process trees, slow starts."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import psutil

_Started = TypeVar("_Started")

# psutil is loaded where it is used: processes that only tie themselves to their parent start often.

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


WATCH_PID = "ASYNC_PIPELINE_WATCH_PID"
"""Environment variable in which `watch` tells its command its own PID."""


def end_with_ancestor(pid: int, patience_s: float) -> bool:
    """Start a thread that ends this process once its ancestor `pid` ends: SIGTERM, then SIGKILL.

    Unlike `end_with_parent`, this works through shells and launchers in between, and lets the process clean
    up for `patience_s`. Returns False if `pid` is no ancestor, or the kernel cannot watch it.
    """
    import psutil

    try:
        descriptor = os.pidfd_open(pid)
    except (AttributeError, OSError):
        return False
    # Look at the ancestors after opening: the number cannot be given to another process in between.
    if pid not in (ancestor.pid for ancestor in psutil.Process().parents()):
        os.close(descriptor)
        return False
    ended = select.poll()
    ended.register(descriptor, select.POLLIN)

    def follow() -> None:
        ended.poll()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(patience_s)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=follow, name=f"follow[{pid}]", daemon=True).start()
    return True


def end_signals() -> tuple[signal.Signals, ...]:
    """Return the signals, besides SIGINT, that ask a process to end.

    SIGHUP, for a closed terminal, is one of them unless it is ignored, as by `nohup`.
    """
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return (signal.SIGTERM,)
    return (signal.SIGTERM, signal.SIGHUP)


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
    return [process.pid for process in _below(root)]


def end_all(pids: Iterable[int], patience_s: float = TERM_S, *, spared: Collection[int] = ()) -> None:
    """Send SIGTERM to the processes, SIGKILL to the survivors after `patience_s`, and reap them.

    Also kills every other descendant of this process, except for `spared`; only after `adopt_orphans` also
    what a process forks while it is killed.
    """
    import psutil

    alive = []
    for pid in pids:
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            process.terminate()
            alive.append(process)
    _, alive = psutil.wait_procs(alive, timeout=patience_s)

    # Processes that were started in the meantime are killed as well; each takes a moment to disappear.
    deadline = time.monotonic() + KILL_S
    while (left := {*alive, *_below(os.getpid(), spared)}) and time.monotonic() < deadline:
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        _, alive = psutil.wait_procs(list(left), timeout=0.01)


SLOW_START, STARTS = "timed out", 3
"""Ray gives a node 30 s to start, which cannot be changed: a part of its error, and how often to try."""


def repeat_slow_start(start: Callable[[], _Started], end_rest: Callable[[Exception], object]) -> _Started:
    """Return the result of `start`, which starts a Ray node; repeat it if it times out.

    `end_rest` gets the error of a start that has failed and ends its processes. Raises the error of the last
    start if each has timed out, and any other error at once.
    """
    for left in reversed(range(STARTS)):
        try:
            return start()
        except Exception as error:
            end_rest(error)
            if SLOW_START not in str(error).lower() or not left:
                raise
    raise AssertionError("unreachable")


def send_signal(pid: int, number: int) -> bool:
    """Send a signal to a process; return False if it is gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _below(root: int, spared: Collection[int] = ()) -> list[psutil.Process]:
    import psutil

    try:
        found = psutil.Process(root).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [process for process in found if process.pid not in spared]
