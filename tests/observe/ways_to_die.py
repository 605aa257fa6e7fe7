# SPDX-License-Identifier: Apache-2.0
"""Code of a user that fails in its workers; they import this file, so it imports little."""

from __future__ import annotations

import asyncio
import builtins
import os
import pickle
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import ray


class Worker:
    def __init__(self, way: str = "", *arguments: Any) -> None:
        if way:
            self.die(way, *arguments)

    def die(self, way: str, *arguments: Any) -> Any:
        return globals()[way](*arguments)


def without_file() -> None:
    Path("tools.yaml").read_text()


def without_a_message() -> None:
    raise NotImplementedError


def with_several_lines(**_: Any) -> float:
    raise ValueError("the judge fell asleep\n  at noon\n\n  and snores")


def without_key() -> None:
    dict[str, float]()["reward"]


class Unpicklable(Exception):
    def __reduce__(self) -> NoReturn:
        raise pickle.PicklingError("it has a lock")


def unpicklable() -> None:
    raise Unpicklable("the lock is held")


class TwoArguments(Exception):
    def __init__(self, tool: str, status: int) -> None:
        super().__init__(f"{tool} returned {status}")


def two_arguments() -> None:
    raise TwoArguments("search", 500)


def chained() -> None:
    try:
        without_file()
    except OSError as error:
        raise RuntimeError("no tools for the policy") from error


def while_handling() -> None:
    try:
        without_file()
    except OSError:
        without_key()


def grouped() -> None:
    group = vars(builtins)["ExceptionGroup"]  # since Python 3.11
    raise group("2 of 8 judges", [ValueError("a judge is missing"), KeyError("b")])


def in_thread() -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(without_key).result()


def in_other_worker(worker: Any, way: str) -> None:
    ray.get(worker.die.remote(way))


def too_late() -> None:
    asyncio.run(asyncio.wait_for(asyncio.Event().wait(), 0.01))


def out_of_memory() -> None:
    bytearray(1 << 62)


def full_disk() -> None:
    Path("/dev/full").write_text("a checkpoint")


def killed(**_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def ended() -> None:
    os._exit(3)


def exited() -> None:
    sys.exit("the licence has expired")


def interrupted() -> None:
    raise KeyboardInterrupt


def hangs() -> None:
    threading.Event().wait()
