# SPDX-License-Identifier: Apache-2.0
"""Summarize a run as `summary.json`: its own process does, or else the one that has started it."""

from __future__ import annotations

import asyncio
import json
import math
import os
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from ...core.flow import FlowResult
from ...core.waits.retry import CheckpointTimes
from ...redaction import without_secrets
from ..causes import one_line
from ..observers import Observers
from .run_files import set_aside

FILE = "summary.json"


@dataclass(kw_only=True)
class RunRecorder:
    """Collects a few floats per step for the summary."""

    strategy: str
    max_lag: int
    started_unix: float
    """Unix time at which the user's command started."""
    rewards: array[float] = field(default_factory=lambda: array("d"))
    step_s: array[float] = field(default_factory=lambda: array("d"))
    kls: array[float] = field(default_factory=lambda: array("d"))
    first_step_unix: float | None = None
    steps_before: int = 0
    """Number of steps that earlier processes of a resumed run trained."""

    def record(self, reward: float, step_s: float, kl: float | None, now_unix: float) -> None:
        """Record one trained step: mean reward of its trajectories, seconds, and verl's rollout_corr/kl."""
        self.rewards.append(reward)
        self.step_s.append(step_s)
        if kl is not None:
            self.kls.append(kl)
        if self.first_step_unix is None:
            self.first_step_unix = now_unix

    def state(self) -> dict[str, Any]:
        """Return the state that a resumed run needs."""
        return {"rewards": list(self.rewards), "step_s": list(self.step_s), "kls": list(self.kls)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state of an earlier process of the run."""
        self.rewards, self.step_s, self.kls = (_floats(state[name]) for name in ("rewards", "step_s", "kls"))
        self.steps_before = len(self.step_s)

    def summarize(
        self, result: FlowResult, overlap_s: float | None, now_unix: float, error: BaseException | None = None
    ) -> dict[str, Any]:
        """Return all keys of summary.json except the account of device-seconds.

        `overlap_s` is None if it was not measured.
        """
        fifth = max(1, len(self.rewards) // 5)
        loads = [p.load_s for p in result.publications]
        first = self.first_step_unix
        known = [p.explained_share for p in result.publications]
        shares = [round(share, 6) for share in known if share is not None]

        return {
            "status": status_of(error),
            "error": one_line(error) if error is not None and status_of(error) == "failed" else None,
            "strategy": self.strategy,
            "max_lag": self.max_lag,
            "steps": result.steps,
            "steps_before": self.steps_before,
            "samples_trained": result.trajectories_trained,
            "groups_drawn": result.groups_drawn,
            "groups_trained": result.groups_trained,
            "groups_filtered": result.groups_filtered,
            "groups_expired": result.groups_expired,
            "groups_failed": result.groups_failed,
            "groups_in_flight": result.groups_in_flight,
            "groups_regenerated": result.regenerated,
            "updates_skipped": result.updates_skipped,
            "reward_first": round(fmean(self.rewards[:fifth]), 6) if self.rewards else None,
            "reward_last": round(fmean(self.rewards[-fifth:]), 6) if self.rewards else None,
            "lag_max": result.lag_max,
            "served_version": result.served_version,
            "trainer_version": result.trainer_version,
            "rollout_corr_kl_max": round(max(abs(k) for k in self.kls), 8) if self.kls else None,
            "overlap_s": None if overlap_s is None else round(overlap_s, 3),
            "publications": result.weight_updates,
            "gather_s_median": round(median(p.gather_s for p in result.publications), 5) if loads else None,
            "load_s_median": round(median(loads), 5) if loads else None,
            "stall_s_median": round(median(p.stall_s for p in result.publications), 5) if loads else None,
            "tensors_proved": result.tensors_proved,
            "explained_share": min(shares) if shares else None,
            "step_s_median": round(median(self.step_s[1:] or self.step_s), 4) if self.step_s else None,
            "train_s": round(now_unix - first + self.step_s[self.steps_before], 1)
            if first is not None
            else 0.0,
            "time_to_first_step_s": None if first is None else round(first - self.started_unix, 1),
            "wall_s": round(now_unix - self.started_unix, 1),
        }


def side_effects(observers: Observers, checkpoints: CheckpointTimes | None) -> dict[str, Any]:
    """Return the keys of summary.json about what failed besides the training.

    `checkpoints`: None if none are written.
    """
    lists = {"observers_off": observers.off, "observers_failing": observers.failing}
    found: dict[str, Any] = {key: dict(errors) for key, errors in lists.items() if errors}
    if checkpoints is not None:
        found |= {"checkpoint_last": checkpoints.last, "checkpoints_failed": checkpoints.failures}
    return found


def _floats(values: Sequence[float | None]) -> array[float]:
    """Return floats from JSON, which holds null in place of NaN."""
    return array("d", [math.nan if value is None else float(value) for value in values])


def write_atomically(path: Path, value: Any, *, unknown: Callable[[Any], Any] | None = None) -> None:
    """Write JSON to a file so that readers see either the old or the new content.

    `unknown` converts values that JSON cannot represent. Raises TypeError if a value cannot be converted.
    """
    part = path.with_suffix(".part")
    part.write_text(without_secrets(json.dumps(value, indent=2, default=unknown)) + "\n", encoding="utf-8")
    os.replace(part, path)


def written_ns(folder: Path) -> int | None:
    """Return when the summary in a run directory was written, or None without one."""
    try:
        return (folder / FILE).stat().st_mtime_ns
    except OSError:
        return None


def write_in_its_place(folder: Path, before: int | None, status: str, error: str | None) -> None:
    """Summarize a run that was killed, or failed before its first step, unless it has done so itself.

    `before`: `written_ns` when it began. A folder that cannot be written to is no error.
    """
    if written_ns(folder) not in (None, before):
        return
    with suppress(OSError):
        set_aside(folder / FILE)
        write_atomically(folder / FILE, {"status": status, "error": error})


def status_of(error: BaseException | None) -> str:
    """Return `completed`, `interrupted` (by Ctrl-C, which cancels all tasks) or `failed`."""
    if error is None:
        return "completed"
    return "interrupted" if isinstance(error, asyncio.CancelledError | KeyboardInterrupt) else "failed"
