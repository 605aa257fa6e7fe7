# SPDX-License-Identifier: Apache-2.0
"""A program that has an engine core's process started by a fork server for which all imports are made.

It prints whether the process has the state of this one, whether its parent is another one, the status of one
that it spawns, and its own.
With the argument `broken`, the fork server fails at the request, and the program prints what it gets.
"""

from __future__ import annotations

import os
import socket
import sys
from multiprocessing import Pipe, forkserver, get_context
from multiprocessing.connection import Connection
from typing import Any

from recipe.async_pipeline.errors import EngineDeadError
from recipe.async_pipeline.verl_bridge.cpu import prefork
from tests.fakes import waiting


def send(pipe: Connection) -> None:
    spawned = get_context("spawn").Process(target=os.getpid)
    spawned.start()
    spawned.join()
    pipe.send((hasattr(waiting, "changed_by_the_parent"), os.getppid(), spawned.exitcode))


def fail(listener: int, alive: int, preload: Any) -> None:
    with socket.socket(fileno=listener) as server:
        server.accept()
        raise RuntimeError("no descriptors are left")


if __name__ == "__main__":
    setattr(prefork, "IMPORTS", {"some": ("json",)})  # noqa: B010
    setattr(waiting, "changed_by_the_parent", True)  # noqa: B010
    if "broken" in sys.argv:
        setattr(forkserver, "main", fail)  # noqa: B010
    prefork.begin({prefork.EARLY: "some"})
    ours, theirs = Pipe()
    process = prefork.Context().Process(target=send, args=(theirs,))
    try:
        process.start()
    except EngineDeadError as error:
        print(error)  # noqa: T201
        sys.exit(1)
    is_fork, parent, spawned = ours.recv()
    process.join()
    print(is_fork, parent != os.getpid(), spawned, process.exitcode)  # noqa: T201
