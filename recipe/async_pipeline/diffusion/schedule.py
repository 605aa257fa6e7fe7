# SPDX-License-Identifier: Apache-2.0
"""Noise levels of a flow matching sampler.

A sample at noise level s is x_s = (1 - s) x_0 + s e, with data x_0 and noise e. A sampler walks from s = 1 to
s = 0 along a `NoiseSchedule`. Flow matching models for large images are trained with levels that are shifted
towards noise, s -> k s / (1 + (k - 1) s) (Stable Diffusion 3, arXiv 2403.03206, equation 23), and are sampled
with the same shift.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..errors import ConfigError


class NoiseInterval(NamedTuple):
    """The part of a schedule that one step covers, for each row of a batch; float64 of shape (rows,)."""

    sigma: torch.Tensor
    """Noise level before the step."""
    next: torch.Tensor
    """Noise level after it."""
    second: torch.Tensor
    """Level after the first step of the schedule, which replaces level 1 where 1 - s is a divisor."""

    @property
    def dt(self) -> torch.Tensor:
        """Return the change of the noise level; negative."""
        return self.next - self.sigma


@dataclass(frozen=True, eq=False)
class NoiseSchedule:
    """The noise levels of one sampler."""

    sigmas: torch.Tensor
    """float64, from 1 down to 0; one more than there are steps."""

    def __post_init__(self) -> None:
        levels = self.sigmas
        falling = levels.dim() == 1 and len(levels) >= 2 and bool((levels.diff() < 0).all())
        if not falling or levels[0] != 1 or levels[-1] != 0:
            raise ConfigError(f"noise levels must fall from 1 to 0, got {levels.tolist()}; see schedule.py")

    @property
    def num_steps(self) -> int:
        return len(self.sigmas) - 1

    def at(self, steps: torch.Tensor) -> NoiseInterval:
        """Return the intervals of some steps, counted from 0; `steps` is an integer tensor (rows,)."""
        sigmas = self.sigmas
        return NoiseInterval(sigmas[steps], sigmas[steps + 1], sigmas[1].expand(len(steps)))


def joined(intervals: list[NoiseInterval]) -> NoiseInterval:
    """Return the intervals of several batches as one batch."""
    return NoiseInterval(*(torch.cat(parts) for parts in zip(*intervals, strict=True)))


def shifted(times: torch.Tensor, shift: float) -> torch.Tensor:
    """Return times in (0, 1] as noise levels: s = k t / (1 + (k - 1) t)."""
    return shift * times / (1 + (shift - 1) * times)


def shifted_schedule(num_steps: int, *, shift: float, last: float) -> NoiseSchedule:
    """Return the schedule whose times are equally spaced from 1 to `last`, and then 0.

    Raises ConfigError if there is no such schedule.
    """
    if num_steps < 1:
        raise ConfigError(f"num_inference_steps must be >= 1, got {num_steps}; 10 is usual in training")
    if not (shift > 0 and 0 < last <= 1):
        raise ConfigError(f"shift must be > 0 and the last time in (0, 1], got {shift} and {last}")
    if num_steps > 1 and last == 1:
        raise ConfigError(f"{num_steps} steps need a last time below 1, got 1")
    times = torch.linspace(1.0, last, num_steps, dtype=torch.float64)
    levels = shifted(times, shift)
    levels[0] = 1.0
    return NoiseSchedule(torch.cat([levels, levels.new_zeros(1)]))
