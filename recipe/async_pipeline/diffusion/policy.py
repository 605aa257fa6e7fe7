# SPDX-License-Identifier: Apache-2.0
"""A velocity field as a policy: the log-probs of recorded SDE steps, as the trainer computes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from .schedule import NoiseSchedule
from .sde import SdeKind, Transition, transition

VelocityField = Callable[[torch.Tensor, torch.Tensor, Mapping[str, torch.Tensor]], torch.Tensor]
"""Latents (rows, ...), noise levels (rows,) and conditions (rows, ...) to velocities, float32."""

ROWS = 8
"""Rows of every forward: a longer batch takes several, and the last one is filled up. Libraries choose their
kernels by the shape of a product, and kernels round differently, but the velocity of a row must not depend on
the rows next to it. Ranks that train together have equally many rows, and so equally many forwards.
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
    """Return the velocity of each row, the same in any batch; see `ROWS`."""
    rows, missing = len(x), -len(x) % ROWS
    if missing:
        x, sigma = _filled(x, missing), _filled(sigma, missing)
        conditions = {name: _filled(one, missing) for name, one in conditions.items()}
    sigma = sigma.to(x.device, torch.float32)

    parts = []
    for start in range(0, len(x), ROWS):
        part = slice(start, start + ROWS)
        given = {name: one[part] for name, one in conditions.items()}
        parts.append(field(x[part], sigma[part], given))
    return torch.cat(parts)[:rows]


def evaluate(
    field: VelocityField,
    *,
    latents: torch.Tensor,
    steps: torch.Tensor,
    conditions: Mapping[str, torch.Tensor],
    schedule: NoiseSchedule,
    kind: SdeKind,
    noise_level: float,
) -> StepValues:
    """Evaluate the recorded steps of some samples.

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
