# SPDX-License-Identifier: Apache-2.0
"""A workload: how much is generated and what is waited for, read from `configs/bench/NAME.yaml`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ..errors import ConfigError
from .waits import Lognormal

DEFAULT_PROMPTS, DEFAULT_ANSWERS = 16, 8
"""Prompts of a step in `configs/smoke_cpu.yaml`, and answers to each."""
CONFIGS = Path(__file__).resolve().parents[3] / "configs"


class Episode(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One trajectory: `turns` answers, with a tool call after each but the last."""

    turns: int = 1
    tool_s: Lognormal | None = None
    """Seconds that a tool call takes. The wait is an await beside the engine, never in it."""
    answer_tokens: Lognormal | None = None
    """Length of each answer; None lets the model end it."""

    def __post_init__(self) -> None:
        if self.turns < 1 or (self.turns > 1) != (self.tool_s is not None):
            raise ConfigError(
                "episode.turns must be >= 1, and episode.tool_s belongs to several turns, got "
                f"turns={self.turns} "
                f"and tool_s={self.tool_s}; mend it in the workload's file"
            )


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What every arm does."""

    reason: str
    """Why this workload is worth measuring; shown with its results."""
    steps: int = 8
    """Optimizer steps that are measured."""
    warmup: int = 4
    """Steps before them: the pipeline fills, caches warm up."""
    cooldown: int = 4
    """Steps after them: generation would otherwise run dry while the last measured steps train."""
    episode: Episode = Episode()
    judge_s: Lognormal | None = None
    """Seconds that the reward of one trajectory takes."""
    reference_s: Lognormal | None = None
    """Seconds that the reference policy takes for a batch beside its computation, as one on other machines
    does.
    """
    overrides: dict[str, Any] = {}
    """Hydra overrides on `configs/smoke_cpu.yaml`, for every arm."""

    def __post_init__(self) -> None:
        if self.steps < 1 or self.warmup < 1 or self.cooldown < 0:
            raise ConfigError(
                f"steps and warmup must be >= 1 and cooldown >= 0, got {self.steps}, {self.warmup} and "
                f"{self.cooldown}; "
                "the first step is never measured"
            )

    @property
    def prompts_per_step(self) -> int:
        return int(self.overrides.get("data.train_batch_size", DEFAULT_PROMPTS))

    @property
    def total_steps(self) -> int:
        return self.warmup + self.steps + self.cooldown


def names() -> list[str]:
    """The workloads that are shipped."""
    return sorted(path.stem for path in (CONFIGS / "bench").glob("*.yaml"))


def load(name: str) -> Workload:
    """Read a shipped workload by name, or a file. Raises ConfigError: unknown, or its file is wrong."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else CONFIGS / "bench" / f"{name}.yaml"
    try:
        return msgspec.yaml.decode(path.read_bytes(), type=Workload)
    except FileNotFoundError:
        raise ConfigError(
            f"no workload {name!r}; there are {', '.join(names())}, or give a .yaml file"
        ) from None
    except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"workload {path}: {' '.join(str(error).split())}") from None
