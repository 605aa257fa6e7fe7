# SPDX-License-Identifier: Apache-2.0
"""Pass Ctrl-C, SIGTERM and SIGHUP to the trainer's actor, so that the run can close its files.

Ray does not interrupt a running task of a named actor; it only sets a flag that the task can poll.

    the command                        the trainer's process, once it has begun
    Ctrl-C, SIGTERM ──── ray.cancel ─► polls the flag every POLL_S ─► cancels the run's coroutine
    waits for at most END_S ◄───────── writes the summary, closes the ledger, ends

SIGTERM is a notice if `faults.notice_s` says so: the run then writes a checkpoint before it is cancelled. The
notice is a key in Ray's key-value store, because the flag has no value.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.experimental.internal_kv import _internal_kv_exists, _internal_kv_put

from ...console import echo
from ...observe.causes import causes, one_line
from ...observe.run_directory.summary import write_in_its_place, written_ns
from ...observe.table import MARK
from ...processes import WATCH_PID, end_signals, end_with_ancestor

T = TypeVar("T")
POLL_S = 0.5
"""Seconds between two polls of Ray's cancellation flag."""
BEGIN_S = 1.0
"""Seconds for a process that does not poll the flag yet, because it starts up, and has no files to close."""
END_S = 10.0
"""Seconds for the run to write its summary and close its files; `watch` kills the rest after twice that."""


def wait_for(running: Any, run_dir: Path, notice_s: float = 0.0) -> None:
    """Wait for a run, given as its ObjectRef, to end, successfully or not.

    Prints the cause and writes the summary if the run's own process could not, because it was killed, or
    failed outside of our code. Without `watch`, the cause of any failure is also this process's last line.

    Raises KeyboardInterrupt on Ctrl-C, or SystemExit on SIGTERM and SIGHUP, after cancelling the run and
    waiting at most END_S for its end, after SIGTERM `notice_s` longer; BEGIN_S if it still starts up.
    """
    before = written_ns(run_dir)
    with _exit_on_signals() as received:
        try:
            ray.wait([running])
        except (KeyboardInterrupt, SystemExit):
            task = running.task_id().hex()
            patience_s = END_S if _internal_kv_exists(_key("begun", task)) else BEGIN_S
            if notice_s and signal.SIGTERM in received and patience_s == END_S:
                _internal_kv_put(_key("notice", task), b"")
                patience_s += notice_s
            ray.cancel(running, recursive=False)  # the run cancels its own calls
            ray.wait([running], timeout=patience_s)
            write_in_its_place(run_dir, before, "interrupted", None)
            raise
    try:
        with causes():
            ray.get(running)
    except Exception as error:  # noqa: BLE001  left to the caller
        cause = one_line(error)
        write_in_its_place(run_dir, before, "failed", cause)
        if WATCH_PID not in os.environ:  # whose last line it is; otherwise hydra has the last word
            atexit.register(lambda: echo(f"{MARK} cause: {cause}", file=sys.stderr))


@contextmanager
def _exit_on_signals() -> Iterator[list[int]]:
    """Raise SystemExit for the first signal that asks to end; later ones must not cut the end short.

    Yields the list that gets that signal, because Ray replaces the status of a SystemExit.
    """
    received: list[int] = []

    def leave(number: int, frame: object) -> None:
        received.append(number)
        for other in before:
            signal.signal(other, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before: dict[signal.Signals, Any] = {}
    for number in end_signals():
        before[number] = signal.signal(number, leave)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_with_watch() -> None:
    """End this process, a driver, if the `watch` that started it is killed; no-op without one."""
    pid = os.environ.get(WATCH_PID, "")
    if pid.isdecimal():
        end_with_ancestor(int(pid), 2 * END_S)


async def until_cancelled(
    work: Coroutine[Any, Any, T], last_words: Callable[[], Coroutine[Any, Any, object]] | None = None
) -> T:
    """Run `work` and return its result, or cancel it once the surrounding Ray task is cancelled; after a
    notice, once `last_words` returns, too.

    Raises any error of `work`, and CancelledError, also inside `work`, if the task was cancelled.
    """
    running = asyncio.ensure_future(work)
    cancelled = asyncio.create_task(_wait_for_cancellation())
    tasks: list[asyncio.Future[Any]] = [running, cancelled]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if last_words is not None and cancelled.done() and not running.done() and _has_notice():
            tasks.append(asyncio.create_task(last_words()))
            await asyncio.wait((running, tasks[-1]), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    if not cancelled.cancelled():
        cancelled.result()  # raises if the poll itself failed
    return running.result()


def _key(what: str, task: str | None = None) -> bytes:
    """Return a key of a task, by default this one.

    `begun`: it polls Ray's flag. `notice`: it may write a checkpoint before it is cancelled.
    """
    return f"async_pipeline/{what}/{task or ray.get_runtime_context().get_task_id()}".encode()


def _has_notice() -> bool:
    return bool(_internal_kv_exists(_key("notice")))


async def _wait_for_cancellation() -> None:
    """Return once Ray has marked the surrounding task as cancelled."""
    _internal_kv_put(_key("begun"), b"")
    while not ray.get_runtime_context().is_canceled():  # noqa: ASYNC110 - Ray has a flag, not an event
        await asyncio.sleep(POLL_S)
