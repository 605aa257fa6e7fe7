# SPDX-License-Identifier: Apache-2.0
"""A second launch, a preemption, a closed terminal, and a stepped clock."""

from __future__ import annotations

import errno
import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recipe.async_pipeline.errors import ConfigError
from recipe.async_pipeline.lab.soak import surroundings as module
from recipe.async_pipeline.lab.soak.job import CLOCK, SoakFailed
from tests import HANG_S
from tests.fakes.soak_run import Run, record

REFUSAL = f"run_dir {module.REFUSED}"


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (f"echo '{REFUSAL}'; exit 2", None),
        (f"echo '{REFUSAL}'", "a second launch ended with 0: run_dir must be"),
        ("echo training; exit 2", "a second launch ended with 2: training"),
    ],
)
def test_a_second_launch_must_be_refused(job: Run, script: str, why: str | None) -> None:
    job.script = script
    if why is None:
        module.launch_again(job)
        return
    with pytest.raises(SoakFailed, match=why):
        module.launch_again(job)


@pytest.mark.parametrize("saved", [6, 7])
def test_a_preempted_run_must_have_saved_its_newest_step(job: Run, saved: int) -> None:
    folder = job.checkpoints / f"global_step_{saved}"
    job.script = f"mkdir -p {folder}; touch {folder}/manifest.json; echo ready; exec sleep 1000"
    job.start()
    job.wait_for_line("ready", HANG_S, since=0)
    job.write(record("SERVED", version=7, replicas=2))
    if saved == 7:
        module.preempt(job)
    else:
        with pytest.raises(SoakFailed, match="after step 7, and the newest checkpoint is of step 6"):
            module.preempt(job)


@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_terminal_that_closes_ends_the_run_and_it_starts_again(job: Run, before: signal.Handlers) -> None:
    """Also if the soak itself ignores that, as under nohup."""
    usual = signal.signal(signal.SIGHUP, before)
    job.script = "echo started; exec sleep 1000"
    try:
        job.start()
    finally:
        signal.signal(signal.SIGHUP, usual)
    job.wait_for_line("started", HANG_S, since=0)
    module.close_terminal(job)
    job.wait_for_line("started", HANG_S, since=len("started\n"))


def test_the_clock_of_a_process_is_stepped_while_it_runs(tmp_path: Path) -> None:
    clock = tmp_path / "clock"
    clock.write_bytes(bytes(8))
    code = (
        "import datetime, json, sys, time\n"
        "for line in sys.stdin:\n"
        "    now = datetime.datetime.now().timestamp()\n"
        "    print(json.dumps([time.time(), now, time.monotonic()]), flush=True)\n"
    )
    library = module.build_clock(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "LD_PRELOAD": str(library), CLOCK: str(clock)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        for offset_s in module.CLOCK_STEPS_S:
            module.set_clock(clock, offset_s)
            before, monotonic = time.time(), time.monotonic()
            process.stdin.write("\n")
            process.stdin.flush()
            seen = json.loads(process.stdout.readline())
            after = time.time()
            assert all(before + offset_s <= one <= after + offset_s for one in seen[:2])
            assert 0 <= seen[2] - monotonic < 1000
        process.stdin.close()


WAIT = """
import ctypes, sys, time

libc = ctypes.CDLL(None)

class Moment(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]

for clock in (time.CLOCK_REALTIME, time.CLOCK_MONOTONIC):
    attributes, condition, mutex = (ctypes.create_string_buffer(64) for _ in range(3))
    libc.pthread_condattr_init(attributes)
    libc.pthread_condattr_setclock(attributes, clock)
    libc.pthread_cond_init(condition, attributes)
    libc.pthread_mutex_lock(mutex)
    until, began = time.clock_gettime_ns(clock) + 50_000_000, time.monotonic()
    deadline = Moment(until // 10**9, until % 10**9)
    status = libc.pthread_cond_timedwait(condition, mutex, ctypes.byref(deadline))
    print(status, time.monotonic() - began)
"""
"""Waits for 50 ms by either clock."""


@pytest.mark.parametrize("offset_s", module.CLOCK_STEPS_S)
def test_a_wait_by_a_stepped_clock_lasts_as_long(tmp_path: Path, offset_s: float) -> None:
    """It would last an hour, or return at once: threads of Ray then took both cores."""
    clock = tmp_path / "clock"
    clock.write_bytes(bytes(8))
    module.set_clock(clock, offset_s)
    environment = {**os.environ, "LD_PRELOAD": str(module.build_clock(tmp_path)), CLOCK: str(clock)}
    waits = subprocess.run(
        [sys.executable, "-c", WAIT], env=environment, capture_output=True, text=True, timeout=HANG_S
    )
    lines = [line.split() for line in waits.stdout.splitlines()]
    assert [int(status) for status, _ in lines] == [errno.ETIMEDOUT] * 2, waits.stderr
    assert all(float(seconds) >= 0.049 for _, seconds in lines)


def test_a_run_must_write_checkpoints_at_any_clock(job: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    job.clock.write_bytes(bytes(8))
    offsets: list[float] = []

    def save(_: float) -> None:
        (offset,) = struct.unpack("d", job.clock.read_bytes())
        offsets.append(offset)
        folder = job.checkpoints / f"global_step_{len(offsets)}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").touch()

    monkeypatch.setattr(time, "sleep", save)
    module.step_clock(job)
    assert tuple(offsets) == module.CLOCK_STEPS_S

    monkeypatch.setattr(time, "sleep", lambda _: None)
    monkeypatch.setattr(module, "STEPPED_S", 0.0)
    with pytest.raises(TimeoutError, match=r"without a newer checkpoint, at \+3600 s"):
        module.step_clock(job)


def test_a_clock_needs_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="stepped_clock must compile a library, .* C compiler as cc"):
        module.build_clock(tmp_path)
