# SPDX-License-Identifier: Apache-2.0
"""One step of a flow matching sampler as a Gaussian policy.

The ODE dx = v ds turns noise into data. An SDE with the same marginal distribution at each noise level makes
the sampler explore, and gives each step a density, so that a step is an action of a policy whose log-prob can
be trained (Flow-GRPO, arXiv 2505.05470; DanceGRPO, arXiv 2505.07818). With velocity v, step ds < 0 and
diffusion g, one step from level s is

    x' ~ N(x + v ds + g^2 / (2 s) (x + (1 - s) v) ds,  g^2 |ds|)

| kind | g | source |
|---|---|---|
| `sde` | a sqrt(s / (1 - s)), with the schedule's second level in place of s = 1 in the divisor | Flow-GRPO |
| `dance_sde` | a | DanceGRPO |
| `ode` | 0: no density | |

`cps`, coefficients-preserving sampling (arXiv 2509.05952), sets the noise of a step so that the noise level
after it is exactly s': with x_0 = x - s v, e = x + (1 - s) v and std = s' sin(a pi / 2),

    x' ~ N((1 - s') x_0 + sqrt(s'^2 - std^2) e,  std^2)

The log-prob of a step is the mean over the elements of a sample, not the sum, as in the implementations of
all three papers; ratios of policies are therefore close to 1, and clip ranges small (1e-5 to 1e-3). The
log-prob of `cps` is by its authors -(x' - mean)^2 alone, without the division by 2 std^2: it orders policies,
but is no density.

Each mean is a linear combination of x and v. Its coefficients are computed in float64 for each row, and the
mean over elements in float64 as well, so that the sampler and the trainer get the same bits for the same x, v
and x', whatever batch a row is in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from ..errors import ConfigError
from .schedule import NoiseInterval, NoiseSchedule

SdeKind = Literal["sde", "cps", "dance_sde", "ode"]
KINDS: tuple[SdeKind, ...] = get_args(SdeKind)
_LOG_SQRT_2_PI = 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True)
class Transition:
    """The Gaussians of one step of each row of a batch; all tensors float64 of shape (rows,)."""

    kind: SdeKind
    of_x: torch.Tensor
    """Coefficient of x in the mean."""
    of_velocity: torch.Tensor
    """Coefficient of the velocity in the mean."""
    std: torch.Tensor
    """Standard deviation of the step."""

    def mean(self, x: torch.Tensor, velocity: torch.Tensor) -> torch.Tensor:
        """Return the mean of x'; float32, differentiable in the velocity."""
        x, velocity = x.float(), velocity.float()
        return _like(self.of_x, x) * x + _like(self.of_velocity, x) * velocity

    def sample(self, mean: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Return x' for standard normal noise."""
        return mean + _like(self.std, mean) * noise

    def log_prob(self, after: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        """Return the log-prob of each row's x', averaged over its elements; float32 of shape (rows,).

        The gradient is that of the mean; x' is a constant. Raises ConfigError for `ode`.
        """
        self._require_density()
        squared = _mean_square(after.detach() - mean)
        if self.kind == "cps":
            return (-squared).float()
        variance = self.std.to(squared.device).square()
        log_std = self.std.log().to(squared.device)
        return (-squared / (2 * variance) - log_std - _LOG_SQRT_2_PI).float()

    def kl(self, mean: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Return how far each row's Gaussian is from the one with another mean: the KL divergence, which is
        symmetric for equal deviations, averaged over the elements as a log-prob is; float32 of shape (rows,).

        Raises ConfigError for `ode`.
        """
        self._require_density()
        variance = self.std.to(mean.device).square()
        return (_mean_square(mean - other) / (2 * variance)).float()

    def entropy(self) -> torch.Tensor:
        """Return the entropy of each row's Gaussian for one element; no gradient, as the std is fixed."""
        self._require_density()
        return (self.std.log() + _LOG_SQRT_2_PI + 0.5).float()

    def _require_density(self) -> None:
        if self.kind == "ode" or not bool((self.std > 0).all()):
            raise ConfigError(
                f"a step without noise has no log-prob (sde_type {self.kind}); "
                "train steps before the last one, and with noise_level > 0"
            )


def transition(kind: SdeKind, interval: NoiseInterval, noise_level: float) -> Transition:
    """Return the Gaussians of one step of each row; `noise_level` is a in the formulas.

    Raises ConfigError if the kind is unknown or the noise level is out of range.
    """
    check_noise(kind, noise_level)
    sigma, after, dt = interval.sigma, interval.next, interval.dt
    if kind == "cps":
        std = after * math.sin(noise_level * math.pi / 2)
        kept = (after.square() - std.square()).clamp(min=0).sqrt()
        return Transition(
            kind=kind,
            of_x=(1 - after) + kept,
            of_velocity=(1 - sigma) * kept - sigma * (1 - after),
            std=std,
        )
    g = _diffusion(kind, interval, noise_level)
    drift = g.square() / (2 * sigma) * dt
    return Transition(
        kind=kind,
        of_x=1 + drift,
        of_velocity=dt + drift * (1 - sigma),
        std=g * (-dt).sqrt(),
    )


def check_noise(kind: str, noise_level: float) -> None:
    """Raise ConfigError unless there is such an SDE."""
    if kind not in KINDS:
        raise ConfigError(f"sde_type must be one of {', '.join(KINDS)}, got {kind!r}")
    highest = 1.0 if kind == "cps" else math.inf
    if not 0 <= noise_level <= highest or math.isinf(noise_level):
        bounds = "in [0, 1]" if kind == "cps" else "finite and >= 0"
        raise ConfigError(f"noise_level must be {bounds} for sde_type {kind}, got {noise_level}")


def _diffusion(kind: SdeKind, interval: NoiseInterval, noise_level: float) -> torch.Tensor:
    sigma = interval.sigma
    if kind == "ode":
        return torch.zeros_like(sigma)
    if kind == "dance_sde":
        return torch.full_like(sigma, noise_level)
    divisor = 1 - torch.where(sigma == 1, interval.second, sigma)
    return noise_level * (sigma / divisor).sqrt()


def _mean_square(difference: torch.Tensor) -> torch.Tensor:
    return difference.square().flatten(1).mean(1, dtype=torch.float64)


def _like(rows: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    """Return a value for each row in the dtype, on the device and in the dimensions of a batch."""
    return rows.to(batch).view(-1, *[1] * (batch.dim() - 1))


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
