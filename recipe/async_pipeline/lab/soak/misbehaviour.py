# SPDX-License-Identifier: Apache-2.0
"""Faults of the code that a user provides: rewards, environments, tools and agents.

    fault ──► control file: a mood ──► one in four of them misbehaves, and leaves a mark
      └── waits until a mark was left, removes the control file ◄──┘

Each of them reads the control file itself, because a signal cannot make a process raise.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from .job import POLL_S, SoakFailed, SoakJob, control_of, served

MISBEHAVE_S, FIRST_S = 8.0, 300.0
"""Seconds for which they misbehave, at least, and at most until the first one has."""
SEEN, COMPLAINT = ".seen", ".complaint"
"""Suffixes of the control file's name: a file that exists once one has misbehaved, and one that says what was
wrong then.
"""


def misbehave(mood: str, versions: int = 0) -> Callable[[SoakJob], None]:
    """Return the injection of a mood. It lasts until so many versions are served after the first of them.

    It raises TimeoutError if none misbehaves or the versions are not served, SoakFailed if one complains.
    """

    def inflict(job: SoakJob) -> None:
        control = control_of(job.folder)
        seen, complaint = Path(f"{control}{SEEN}"), Path(f"{control}{COMPLAINT}")
        seen.unlink(missing_ok=True)
        control.write_text(mood)
        try:
            _wait(job, seen)
            if versions:
                job.wait_for(f"{versions} versions during {mood}", served(versions), FIRST_S)
        finally:
            control.unlink()
        if complaint.exists():
            raise SoakFailed(complaint.read_text(encoding="utf-8"))

    return inflict


def _wait(job: SoakJob, seen: Path) -> None:
    begun = time.monotonic()
    while (passed_s := time.monotonic() - begun) < MISBEHAVE_S or not seen.exists():
        job.check_alive()
        if passed_s > FIRST_S:
            raise TimeoutError(f"{FIRST_S:g} s in which nothing misbehaved")
        time.sleep(POLL_S)
