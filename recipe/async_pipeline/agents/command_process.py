# SPDX-License-Identifier: Apache-2.0
"""A process that runs one command, and ends with everything that it started.

    worker ──lifeline──► guard ──► command: own process group, own folder, own environment

    python -I -S command_process.py LIFELINE < {"command": [...], "cwd": "...", "env": {...}}

The guard ends with the status of the command. It kills the command's process group when the command ends,
when the lifeline, a pipe, is closed, and when the worker dies in any way. The kernel kills the command if the
guard is killed. The environment arrives over stdin, because every user of the machine can read command lines.

The guard is run as a file and imports the standard library only: an episode should not pay for more.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
from collections.abc import Mapping
from typing import Any

_SET_PDEATHSIG, _SET_NO_NEW_PRIVS = 1, 38
NOT_STARTED = 127
"""Exit status if the command cannot be started, as shells have it."""


def main(arguments: list[str]) -> int:
    """Run as guard. Returns the exit status of the command, 128 + n if signal n killed it."""
    lifeline = int(arguments[0])
    spec = json.load(sys.stdin)
    command = os.fork()
    if command == 0:
        os.close(lifeline)
        run(spec)

    try:
        os.setpgid(command, command)
    except PermissionError:  # the child was faster, and its program has begun
        pass
    return guard(command, lifeline)


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
    """Wait until the command or the owner of the lifeline ends; then kill the command's process group."""
    # Ctrl-C reaches all processes of a terminal; the worker decides what it means.
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
