# SPDX-License-Identifier: Apache-2.0
"""A workload: the amount of generation and the latencies, read from `configs/bench/NAME.yaml`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from ....errors import ConfigError
from .waits import LognormalWait

DEFAULT_PROMPTS, DEFAULT_RESPONSES = 16, 8
"""Prompts of a step and responses per prompt in `configs/smoke_cpu.yaml`."""
CONFIGS = Path(__file__).resolve().parents[5] / "configs"


class EpisodeWorkload(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One trajectory: `turns` responses, with a tool call after each but the last.

    With an environment at most `turns`, because it may end the episode, and a step of it after each.
    """

    environment: Literal["frozen_lake"] | None = None
    turns: int = 1
    tool_s: LognormalWait | None = None
    """Seconds of a tool call or of a step, awaited outside of the engine."""
    answer_tokens: LognormalWait | None = None
    """Length of each response in tokens; None lets the model end it."""

    def __post_init__(self) -> None:
        if self.turns < 1 or (self.turns > 1) != (self.tool_s is not None):
            raise ConfigError(
                "episode.turns must be >= 1, and episode.tool_s must be set exactly if turns > 1, got "
                f"turns={self.turns} and tool_s={self.tool_s}; correct the workload's file"
            )
        if self.environment is not None and (self.turns == 1 or self.answer_tokens is not None):
            raise ConfigError(
                f"episode.environment requires turns > 1 and no answer_tokens, got turns={self.turns} and "
                f"answer_tokens={self.answer_tokens}; correct the workload's file"
            )


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The work of every arm."""

    reason: str
    """Why the workload is worth measuring; shown with its results."""
    steps: int = 8
    """Optimizer steps to measure."""
    warmup: int = 4
    """Steps before the measured ones, in which the pipeline fills and caches warm up."""
    cooldown: int = 4
    """Steps after the measured ones, so that generation has work while the last measured steps train."""
    task: Literal["image"] | None = None
    """What the policy makes instead of texts; such a workload has no other episode."""
    episode: EpisodeWorkload = EpisodeWorkload()
    judge_s: LognormalWait | None = None
    """Seconds of the reward of one trajectory."""
    reference_s: LognormalWait | None = None
    """Seconds that the reference policy waits per batch in addition to its computation, as if remote."""
    overrides: dict[str, Any] = {}
    """Hydra overrides on `configs/smoke_cpu.yaml` for every arm."""

    def __post_init__(self) -> None:
        if self.steps < 1 or self.warmup < 1 or self.cooldown < 0:
            raise ConfigError(
                f"steps and warmup must be >= 1 and cooldown >= 0, got {self.steps}, {self.warmup} and "
                f"{self.cooldown}; correct the workload's file (the first step is never measured)"
            )
        if self.task is not None and self.episode != EpisodeWorkload():
            raise ConfigError(
                f"task={self.task} requires no episode, got {self.episode}; correct the workload's file"
            )

    @property
    def prompts_per_step(self) -> int:
        """Prompts of one optimizer step."""
        return int(self.overrides.get("data.train_batch_size", DEFAULT_PROMPTS))

    @property
    def total_steps(self) -> int:
        """Optimizer steps of a job: warm-up, measured steps and cool-down."""
        return self.warmup + self.steps + self.cooldown


def names() -> list[str]:
    """Return the names of the shipped workloads."""
    return sorted(path.stem for path in (CONFIGS / "bench").glob("*.yaml"))


def load(name: str) -> Workload:
    """Read a shipped workload by name, or a file. Raises ConfigError if it is unknown or invalid."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else CONFIGS / "bench" / f"{name}.yaml"
    try:
        return msgspec.yaml.decode(path.read_bytes(), type=Workload)
    except FileNotFoundError:
        raise ConfigError(
            f"no workload {name!r}; use one of {', '.join(names())}, or give a .yaml file"
        ) from None
    except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"workload {path}: {' '.join(str(error).split())}") from None
