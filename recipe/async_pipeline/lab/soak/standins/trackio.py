# SPDX-License-Identifier: Apache-2.0
"""A tracker that refuses calls or hangs, if its control file requests it. verl imports it by this name."""

from __future__ import annotations

import os
import time
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import Any

REFUSES, HANGS = "tracker_503", "tracker_hang"
"""The misbehaviours that the control file can request."""
context_vars = SimpleNamespace(current_run=ContextVar("current_run", default=None))


def init(**_: Any) -> None:
    """Begin a run. Raises ConnectionError if the control file requests it."""
    _misbehave()
    context_vars.current_run.set("soak")


def log(metrics: Any, step: int) -> None:
    """Take the metrics of a step. Raises ConnectionError if the control file requests it."""
    _misbehave()


def finish() -> None:
    """End the run."""


def _misbehave() -> None:
    control = Path(os.environ["ASYNC_PIPELINE_MOOD"])
    mood = _mood(control)
    if mood in (REFUSES, HANGS):
        Path(f"{control}.seen").touch()
    if mood == REFUSES:
        raise ConnectionError("503 Service Unavailable")
    while mood == HANGS:
        time.sleep(0.05)
        mood = _mood(control)


def _mood(control: Path) -> str:
    return control.read_text(encoding="utf-8") if control.is_file() else ""
