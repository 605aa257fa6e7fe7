# SPDX-License-Identifier: Apache-2.0
"""State of one run that is decided when it is launched, as opposed to the knobs that the user sets.

The launch writes it into verl's config below `RUNTIME`, because verl passes that config to every process of a
run. Each process parses it once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..paths import RUNTIME, select
from ..placement import Placement


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """The decisions of the launch for one run."""

    run: str
    """Name of the run, kept when it is resumed."""
    identity: Mapping[str, str]
    """Settings that must not change when the run is resumed; see `checkpoint.resume.identity_of`."""
    epoch: int
    """Number of this process among all processes that have written to the folder for checkpoints."""
    run_dir: Path
    """Absolute path."""
    run_dir_mark: str | None
    """File that the driver left there, or None if the trainer runs on the driver's node."""
    resume_from: Path | None
    """Folder of the checkpoint, or None if the run starts at the beginning."""
    started_unix: float
    """Time at which the user's command started."""
    placement: Placement
    """Which stages compute on which devices."""
    old_logp: str
    """The policy of old log-probs; see `scheduling.proximal_policy`."""
    reward_manager: Mapping[str, Any] | None
    """verl's settings of a reward manager that this package replaces, or None."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> RuntimeConfig:
        """Read the state from a whole verl config that the launch has prepared."""
        plain = select(config, RUNTIME)
        return cls(
            run=str(plain["run"]),
            identity={str(name): str(value) for name, value in plain["identity"].items()},
            epoch=int(plain["epoch"]),
            run_dir=Path(plain["run_dir"]),
            run_dir_mark=plain["run_dir_mark"],
            resume_from=None if plain["resume_from"] is None else Path(plain["resume_from"]),
            started_unix=float(plain["started_unix"]),
            placement=Placement.from_list(plain["placement"]),
            old_logp=str(plain["old_logp"]),
            reward_manager=plain["reward_manager"],
        )

    def plain(self) -> dict[str, Any]:
        """Return plain values for a config; the inverse of `of`."""
        return {
            "run": self.run,
            "identity": dict(self.identity),
            "epoch": self.epoch,
            "run_dir": str(self.run_dir),
            "run_dir_mark": self.run_dir_mark,
            "resume_from": None if self.resume_from is None else str(self.resume_from),
            "started_unix": self.started_unix,
            "placement": self.placement.as_list(),
            "old_logp": self.old_logp,
            "reward_manager": None if self.reward_manager is None else dict(self.reward_manager),
        }
