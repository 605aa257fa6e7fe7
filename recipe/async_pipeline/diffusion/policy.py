# SPDX-License-Identifier: Apache-2.0
"""A velocity field as a policy: the log-probs of recorded SDE steps, as the trainer computes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from .schedule import Schedule
from .sde import Kind, Transition, transition

VelocityField = Callable[[torch.Tensor, torch.Tensor, Mapping[str, torch.Tensor]], torch.Tensor]
"""Latents (rows, ...), noise levels (rows,) and conditions (rows, ...) to velocities, float32."""

ROW_MULTIPLE = 8
"""Rows of a forward are filled up to a multiple of this. Kernels for fewer rows round differently, and the
velocity of a row must not depend on the rows next to it.
"""


@dataclass(frozen=True)
class StepValues:
    """What a policy gives to the recorded steps of a batch."""

    log_probs: torch.Tensor
    """float32 (samples, steps), with the gradient of the velocity."""
    means: torch.Tensor
    """float32 (samples, steps, ...)."""
    transition: Transition
    """Of all steps of all samples, in one row each: sample by sample."""


def velocities(
    field: VelocityField, x: torch.Tensor, sigma: torch.Tensor, conditions: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Return the velocity of each row, the same in any batch; see `ROW_MULTIPLE`."""
    rows = len(x)
    missing = -rows % ROW_MULTIPLE
    if missing:
        x, sigma = _filled(x, missing), _filled(sigma, missing)
        conditions = {name: _filled(one, missing) for name, one in conditions.items()}
    return field(x, sigma.to(x.device, torch.float32), conditions)[:rows]


def evaluate(
    field: VelocityField,
    *,
    latents: torch.Tensor,
    steps: torch.Tensor,
    conditions: Mapping[str, torch.Tensor],
    schedule: Schedule,
    kind: Kind,
    noise_level: float,
) -> StepValues:
    """Evaluate the recorded steps of some samples, all in one forward.

    `latents` is (samples, steps + 1, ...): before the first step, and after each. `steps` is
    (samples, steps), their indices in the schedule. `conditions` have a row for each sample.
    """
    samples, count = steps.shape
    before, after = (one.flatten(0, 1) for one in (latents[:, :-1], latents[:, 1:]))
    interval = schedule.at(steps.flatten().cpu())
    of_steps = {name: one.repeat_interleave(count, dim=0) for name, one in conditions.items()}
    velocity = velocities(field, before, interval.sigma, of_steps)

    step = transition(kind, interval, noise_level)
    mean = step.mean(before, velocity)
    log_probs = step.log_prob(after, mean)
    return StepValues(log_probs.view(samples, count), mean.unflatten(0, (samples, count)), step)


def _filled(batch: torch.Tensor, count: int) -> torch.Tensor:
    return torch.cat([batch, batch[-1:].expand(count, *batch.shape[1:])])
