# SPDX-License-Identifier: Apache-2.0
"""A program that has an engine core's process started by a fork server for which all imports are made.

It prints whether the process has the state of this one, whether its parent is another one, and its status.
"""

from __future__ import annotations

import os
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from recipe.async_pipeline.verl_bridge.rollout import prefork
from tests.fakes import waiting


def send(pipe: Connection) -> None:
    pipe.send((hasattr(waiting, "changed_by_the_parent"), os.getppid()))


if __name__ == "__main__":
    setattr(prefork, "IMPORTS", {"some": ("json",)})  # noqa: B010
    setattr(waiting, "changed_by_the_parent", True)  # noqa: B010
    prefork.begin({prefork.EARLY: "some"})
    ours, theirs = Pipe()
    process = prefork.Context().Process(target=send, args=(theirs,))
    process.start()
    is_fork, parent = ours.recv()
    process.join()
    print(is_fork, parent != os.getpid(), process.exitcode)  # noqa: T201
