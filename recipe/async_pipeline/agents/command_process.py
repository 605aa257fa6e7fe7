# SPDX-License-Identifier: Apache-2.0
"""A process that runs one command, and ends with everything that it started.

    worker ──lifeline──► guard ──► command: own process group, own folder, own environment

    python -I -S command_process.py LIFELINE REPORT < {"command": [...], "cwd": "...", "env": {...}}

The guard ends with the status of the command. It kills the command's process group when the command ends,
when the lifeline, a pipe, is closed, and when the worker dies in any way. The kernel kills the command if the
guard is killed. The environment arrives over stdin, because every user of the machine can read command lines.
Orphans of the command become children of the guard, so that it can tell how many have left the process group
and are still running; it writes their number to REPORT, a pipe.

The guard is run as a file and imports the standard library only: an episode should not pay for more.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any

_SET_PDEATHSIG, _SET_CHILD_SUBREAPER, _SET_NO_NEW_PRIVS = 1, 36, 38
NOT_STARTED = 127
"""Exit status if the command cannot be started, as shells have it."""
GROUP_ENDS_S = 1.0
"""Seconds that the killed processes of a group get to disappear before the others are counted."""


def main(arguments: list[str]) -> int:
    """Run as guard. Returns the exit status of the command, 128 + n if signal n killed it."""
    lifeline, report = map(int, arguments)
    spec = json.load(sys.stdin)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    command = os.fork()
    if command == 0:
        os.close(lifeline)
        os.close(report)
        run(spec)

    try:
        os.setpgid(command, command)
    except PermissionError:  # the child was faster, and its program has begun
        pass
    signal.signal(signal.SIGCHLD, lambda *_: reap_orphans(command))
    status = guard(command, lifeline)
    try:
        os.write(report, str(count_left(command)).encode())
    except OSError:
        pass  # the worker is gone
    return status


def run(spec: Mapping[str, Any]) -> None:
    """Replace this process by the command. Exits if it cannot be started."""
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None).prctl
        prctl(_SET_PDEATHSIG, signal.SIGKILL)
        prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    os.setpgid(0, 0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        os.chdir(spec["cwd"])
        os.execvpe(spec["command"][0], spec["command"], spec["env"])
    except OSError as error:
        os.write(2, f"{spec['command'][0]}: {error.strerror}\n".encode())
        os._exit(NOT_STARTED)


def guard(command: int, lifeline: int) -> int:
    """Wait until the command or the owner of the lifeline ends; then kill the command's process group.

    Returns the command's exit status, 128 + n if signal n killed it.
    """
    # Ctrl-C reaches all processes of a terminal; the owner decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    waiting = select.poll()
    waiting.register(lifeline, select.POLLIN | select.POLLHUP)
    waiting.register(os.pidfd_open(command), select.POLLIN)
    status = 0
    try:
        waiting.poll()
    finally:
        # The command is not reaped yet, so no other process group can have its number.
        try:
            os.killpg(command, signal.SIGKILL)
        except ProcessLookupError:
            pass
        status = os.waitstatus_to_exitcode(os.waitpid(command, 0)[1])
    return status if status >= 0 else 128 - status


def children() -> list[int]:
    """Return the children of this process; none if the kernel does not tell."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []


def reap_orphans(command: int) -> None:
    """Reap what was left to this process and has ended; the command itself is reaped by `guard`."""
    for pid in children():
        if pid != command:
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                pass


def count_left(group: int) -> int:
    """Return how many processes outside of the killed group are still running."""
    until = time.monotonic() + GROUP_ENDS_S
    while True:
        reap_orphans(0)
        outside = [pid for pid in children() if not _is_in(pid, group)]
        if len(outside) == len(children()) or time.monotonic() > until:
            return len(outside)
        # Killed processes end soon, and leave what they started to this process.
        time.sleep(0.01)


def _is_in(pid: int, group: int) -> bool:
    try:
        return os.getpgid(pid) == group
    except ProcessLookupError:
        return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
