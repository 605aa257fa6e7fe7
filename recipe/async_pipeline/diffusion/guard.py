# SPDX-License-Identifier: Apache-2.0
"""GRPO-Guard (arXiv 2510.22319): a ratio whose mean is 1 and whose spread is the same at all noise levels.

With x' = m_old + std e and d = m - m_old, the log-ratio of a step is the mean of e d / std - d^2 / (2 std^2).
Its second term makes the ratio smaller than 1 on average, so that clipping from above never acts, and 1 / std
makes late steps count more. Guard adds the second term back and multiplies by std:

    log rho = (log p - log p_old + |m - m_old|^2 / (2 std^2)) std,   loss: -A rho / |ds|, clipped in rho

Implementations use the mean of std and of |ds| over the batch, so that a sample's ratio depends on its
neighbours and, with different windows in a batch, is scaled wrongly. Here each sample has its own.
"""

from __future__ import annotations

import torch

from ..errors import ConfigError
from .sde import Transition


def guarded_log_ratio(
    step: Transition,
    *,
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    mean: torch.Tensor,
    old_mean: torch.Tensor,
) -> torch.Tensor:
    """Return log rho of each row; means are (rows, ...), log-probs (rows,).

    The old mean and log-prob are constants. Raises ConfigError for cps, whose log-prob is no density.
    """
    _require_sde(step)
    std = step.std.to(mean.device)
    moved = (mean - old_mean.detach()).square().flatten(1).mean(1, dtype=torch.float64)
    plain = log_prob.double() - old_log_prob.detach().double()
    return ((plain + moved / (2 * std.square())) * std).float()


def guard_weight(step: Transition) -> torch.Tensor:
    """Return the factor of each row's loss, 1 / |ds|."""
    _require_sde(step)
    return (-1 / step.dt).float()


def _require_sde(step: Transition) -> None:
    if step.kind not in ("sde", "dance_sde"):
        raise ConfigError(
            f"grpo_guard needs the density of a step, which sde_type {step.kind} has not; "
            "set sde or dance_sde"
        )
