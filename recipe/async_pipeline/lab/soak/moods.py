# SPDX-License-Identifier: Apache-2.0
"""A FrozenLake that misbehaves in one episode in four, if its control file requests it.

Environments and agents run in separate processes, which should import nothing heavy.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from ...agents.environment import Step
from ...agents.frozen_lake import FrozenLake

MOODS = ("hang", "die", "raise")
"""The misbehaviours that the control file can request."""
ONE_IN = 4


class MoodyLake(FrozenLake):
    """Misbehaves in the second step of an episode."""

    def __init__(self, *, control: str, **kwargs: Any) -> None:
        """`control`: a file that contains one of `MOODS`; empty or missing means none."""
        super().__init__(**kwargs)
        self._control, self._steps, self._episodes = Path(control), 0, 0

    def reset(self, seed: int, **task: Any) -> Any:
        """Begin an episode."""
        self._steps, self._episodes = 0, self._episodes + 1
        return super().reset(seed, **task)

    def step(self, text: str) -> Step:
        """Do the action, unless the control file requests something else."""
        self._steps += 1
        # By process and episode, not by seed: another attempt at the same episode may succeed.
        if self._steps == 2 and (os.getpid() + self._episodes) % ONE_IN == 0:
            misbehave(self._control)
        return super().step(text)


def misbehave(control: Path) -> str:
    """Do what the control file requests, and return that. Raises RuntimeError if it is to raise."""
    mood = control.read_text(encoding="utf-8") if control.is_file() else ""
    if mood in MOODS:
        Path(f"{control}.seen").touch()
    if mood == "raise":
        raise RuntimeError("the control file requests an exception")
    if mood == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    while mood == "hang":
        time.sleep(1)
    return mood
