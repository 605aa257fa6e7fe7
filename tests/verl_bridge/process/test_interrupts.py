# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C cancels the run, which gets time to write its files; with real Ray."""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray

from recipe.async_pipeline.processes import WATCH_PID
from recipe.async_pipeline.verl_bridge.process import interrupts
from tests import HANG_S
from tests.fakes.ray_nodes import start_ray

pytestmark = pytest.mark.real_engine


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    start_ray()
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for the end of a run as long as it takes on a busy machine."""
    monkeypatch.setattr(interrupts, "END_S", HANG_S)


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """Handle Ctrl-C as in a terminal; a shell makes background jobs ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Trainer:
    """An actor like verl's: a synchronous method that runs an event loop.

    With an async method Ray would make it an asyncio actor.
    """

    def run(self, log: Path, how: str) -> str:
        log.write_text("begun\n")
        try:
            return asyncio.run(interrupts.until_cancelled(train(how), partial(save, log)))
        except asyncio.CancelledError:
            with log.open("a") as file:
                file.write("interrupted\n")
            raise


async def save(log: Path) -> None:
    with log.open("a") as file:
        file.write("saved\n")


async def train(how: str) -> str:
    if how == "for ever":
        await asyncio.Event().wait()
    elif how == "fail":
        raise RuntimeError("the real error")
    elif how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    return "completed"


def signal_once(log: Path, number: signal.Signals = signal.SIGINT) -> threading.Thread:
    def press() -> None:
        while not log.exists():
            waiting.wait(0.05)
        os.kill(os.getpid(), number)

    waiting = threading.Event()
    thread = threading.Thread(target=press, daemon=True)
    thread.start()
    return thread


def test_ctrl_c_lets_the_run_write_its_files(tmp_path: Path) -> None:
    log = tmp_path / "log"
    running = ray.remote(Trainer).options(num_cpus=0).remote().run.remote(log, "for ever")
    pressed = signal_once(log)
    with pytest.raises(KeyboardInterrupt):
        interrupts.wait_for(running, tmp_path)
    pressed.join()
    assert log.read_text() == "begun\ninterrupted\n"
    assert ray.wait([running], timeout=0)[0] == [running], "the run has ended"


@pytest.mark.parametrize(("notice_s", "lines"), [(0.0, ["interrupted"]), (HANG_S, ["saved", "interrupted"])])
def test_sigterm_lets_the_run_write_a_checkpoint_if_there_is_time(
    tmp_path: Path, notice_s: float, lines: list[str]
) -> None:
    log = tmp_path / "log"
    running = ray.remote(Trainer).options(num_cpus=0).remote().run.remote(log, "for ever")
    sent = signal_once(log, signal.SIGTERM)
    with pytest.raises(SystemExit):
        interrupts.wait_for(running, tmp_path, notice_s)
    sent.join()
    assert log.read_text().split() == ["begun", *lines]


@pytest.mark.parametrize("how", ["return", "fail"])
def test_the_outcome_of_a_run_is_left_to_the_caller(tmp_path: Path, how: str) -> None:
    running = ray.remote(Trainer).options(num_cpus=0).remote().run.remote(tmp_path / "log", how)
    interrupts.wait_for(running, tmp_path)
    if how == "return":
        assert ray.get(running) == "completed"
    else:
        with pytest.raises(RuntimeError, match="the real error"):
            ray.get(running)


@pytest.mark.parametrize(
    ("how", "cause"), [("die", "ActorDiedError: "), ("fail", "RuntimeError: the real error")]
)
def test_the_driver_tells_a_cause_that_the_run_has_not_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str, cause: str
) -> None:
    running = ray.remote(Trainer).options(num_cpus=0).remote().run.remote(tmp_path / "log", how)
    interrupts.wait_for(running, tmp_path)
    assert f"cause: {cause}" in capsys.readouterr().out
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "failed" and summary["error"].startswith(cause)
    assert how == "fail" or "its process was killed (`dmesg`" in summary["error"]


@pytest.mark.parametrize("watched", [False, True])
def test_the_cause_is_the_last_line_of_a_command_without_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], watched: bool
) -> None:
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    monkeypatch.delenv(WATCH_PID, raising=False)
    if watched:
        monkeypatch.setenv(WATCH_PID, str(os.getpid()))
    running = ray.remote(Trainer).options(num_cpus=0).remote().run.remote(tmp_path / "log", "fail")
    interrupts.wait_for(running, tmp_path)
    capsys.readouterr()
    for call in at_exit:
        call()
    last = capsys.readouterr().err
    assert not last if watched else "cause: RuntimeError: the real error" in last


@pytest.mark.parametrize("begun", [False, True])
def test_a_run_that_does_not_hear_ctrl_c_does_not_delay_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    """It starts up still, which takes less than `END_S` to find out, or hangs."""

    class Deaf:
        def run(self, log: Path) -> None:
            asyncio.run(interrupts.until_cancelled(hang(log.touch)) if begun else hang(log.touch))

    async def hang(tell: Callable[[], None]) -> None:
        await asyncio.sleep(0)
        tell()
        threading.Event().wait()

    if begun:
        monkeypatch.setattr(interrupts, "END_S", 0.1)
        monkeypatch.setattr(interrupts, "BEGIN_S", HANG_S)
    log = tmp_path / "log"
    deaf = ray.remote(Deaf).options(num_cpus=0).remote()
    running = deaf.run.remote(log)
    signal_once(log)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        interrupts.wait_for(running, tmp_path)
    assert time.monotonic() - started < HANG_S / 2
    assert ray.wait([running], timeout=0)[0] == []
    assert json.loads((tmp_path / "summary.json").read_text()) == {"status": "interrupted", "error": None}
    ray.kill(deaf)


@pytest.fixture
def cancelled(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """An event that marks the Ray task as cancelled when set."""
    event = asyncio.Event()
    monkeypatch.setattr(interrupts, "_wait_for_cancellation", event.wait)
    return event


def on_loop(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(interrupts.until_cancelled(work))


def test_the_result_of_the_run_is_returned(cancelled: asyncio.Event) -> None:
    assert on_loop(asyncio.sleep(0, 3)) == 3


def test_the_error_of_the_run_propagates(cancelled: asyncio.Event) -> None:
    async def fails() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        on_loop(fails())


def test_the_run_gets_time_to_clean_up(cancelled: asyncio.Event) -> None:
    cleaned: list[str] = []

    async def work() -> None:
        cancelled.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.append("after an await")

    with pytest.raises(asyncio.CancelledError):
        on_loop(work())
    assert cleaned == ["after an await"]


def test_an_error_of_the_cancellation_poll_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken() -> None:
        raise RuntimeError("not in a worker")

    monkeypatch.setattr(interrupts, "_wait_for_cancellation", broken)
    with pytest.raises(RuntimeError, match="not in a worker"):
        on_loop(asyncio.sleep(60))
