# SPDX-License-Identifier: Apache-2.0
"""Faults of what surrounds a run: its screen, its terminal, its scheduler, its clock, a second launch."""

from __future__ import annotations

import signal
import struct
import subprocess
import time
from pathlib import Path

from ...errors import ConfigError
from .job import POLL_S, SoakFailed, SoakJob, served

READERLESS_S = 300.0
"""Seconds until the run must have served two versions although its output has no reader."""
REFUSED, REFUSED_S = "must be the folder of one run at a time", 300.0
"""Part of the message for a second launch, and seconds until it must have ended."""
CLOCK_STEPS_S = (3600.0, -3600.0, 0.0)
"""Where the clock of the run is, one after another, in seconds from the real one."""
STEPPED_S = 300.0
"""Seconds until the run must have written a checkpoint there."""
CLOCK_SOURCE = Path(__file__).with_name("stepped_clock.c")


def close_output(job: SoakJob) -> None:
    """End the reader of the run's output: the run continues. Then start it again, with a reader."""
    job.close_output()
    job.wait_for("two versions without a reader of the output", served(2), READERLESS_S)
    job.end(signal.SIGINT)
    job.start()


def close_terminal(job: SoakJob) -> None:
    """Send SIGHUP, as the kernel does: everything ends. Then start the run again."""
    job.end(signal.SIGHUP)
    job.start()


def preempt(job: SoakJob) -> None:
    """Send SIGTERM: the run writes a checkpoint of a step that is not older than this moment, and ends."""
    trained = job.newest_version()
    job.end(signal.SIGTERM)
    if (saved := job.newest_checkpoint()) < trained:
        raise SoakFailed(f"SIGTERM came after step {trained}, and the newest checkpoint is of step {saved}")
    job.start()


def launch_again(job: SoakJob) -> None:
    """Start the command a second time: it is refused, and touches nothing."""
    ended = job.run_again(REFUSED_S)
    if ended.returncode != 2 or REFUSED not in ended.stdout:
        raise SoakFailed(f"a second launch ended with {ended.returncode}: {ended.stdout[-300:]}")


def step_clock(job: SoakJob) -> None:
    """Step the clock of all processes of the run, there and back; each time a newer checkpoint must come.

    Raises TimeoutError if none does.
    """
    for offset_s in CLOCK_STEPS_S:
        set_clock(job.clock, offset_s)
        saved, until = job.newest_checkpoint(), time.monotonic() + STEPPED_S
        while job.newest_checkpoint() <= saved:
            job.check_alive()
            if time.monotonic() > until:
                raise TimeoutError(f"{STEPPED_S:g} s without a newer checkpoint, at {offset_s:+g} s")
            time.sleep(POLL_S)


def set_clock(file: Path, offset_s: float) -> None:
    """Set the difference from the real clock, in seconds, for processes that have preloaded the library."""
    with file.open("r+b", buffering=0) as written:
        written.write(struct.pack("d", offset_s))


def build_clock(folder: Path) -> Path:
    """Compile the library that steps a process's clock. Raises ConfigError without a C compiler."""
    library = folder / "stepped_clock.so"
    command = ["cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(CLOCK_SOURCE), "-ldl"]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        why = str(getattr(error, "stderr", "") or error).strip()
        raise ConfigError(
            f"--faults stepped_clock must compile a library, which failed ({why}); install a C compiler as "
            "cc, or leave the fault out"
        ) from None
    return library
