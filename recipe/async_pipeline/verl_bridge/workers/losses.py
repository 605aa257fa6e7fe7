# SPDX-License-Identifier: Apache-2.0
"""Off-policy losses that verl lacks, of each token. `loss_names` lists all that ROLL's `pg_variant` names.

Every tensor is (batch, response length). Log-probs are those of the generated tokens: `log_prob` under the
policy in training, `old_log_prob` under the one that the ratio is against. To correct for the age of a sample
that must be the policy that generated it (verl: `algorithm.rollout_correction.bypass_mode=True`); against
log-probs that the trainer computes at the start of its step, only the drift within the step is corrected.

Gradient flows through the factor `log_prob` alone. The ratio that weighs it is a constant: a token beyond a
bound is still learned from, with a bounded weight, where PPO would drop it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

RatioLevel = Literal["token", "sequence"]
"""What the ratio of a token is of: that token, or all tokens of its answer together."""


class TokenLosses(NamedTuple):
    """The loss of each token and how it came about; 0 outside of the mask, whatever stands there."""

    loss: torch.Tensor
    """To be minimised; the caller aggregates."""
    weight: torch.Tensor
    """What multiplies -A log pi, but for the behaviour weight."""
    truncated: torch.Tensor
    """Boolean: the ratio was beyond a bound."""


def tis(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    lower: float = 0.0,
    upper: float = 1.0,
    behaviour_weight: torch.Tensor | None = None,
) -> TokenLosses:
    """REINFORCE with truncated importance sampling: -sg(clip(r, lower, upper)) A log pi, r = pi / pi_old.

    The policy gradient of IMPALA's V-trace (arXiv 1802.01561), whose bound on r is `upper`; `tis` of ROLL.
    Gradient in log_prob: -clip(r, lower, upper) A.

    `upper` bounds the weight of a token that became more likely, and so the variance; at 1 none counts for
    more than it was sampled. `lower` keeps tokens that became unlikely in the sum: a bias, none at 0.
    `behaviour_weight`: one more constant factor a token, of pi_old / pi_behaviour where those two differ.
    """
    ratio = _ratio(log_prob, old_log_prob, mask, "token")
    return _reinforce(
        log_prob,
        advantages,
        mask,
        weight=ratio.clamp(lower, upper),
        truncated=(ratio < lower) | (ratio > upper),
        behaviour_weight=behaviour_weight,
    )


def topr(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    positive: torch.Tensor | None = None,
    positive_weight: float = 1.0,
    negative_weight: float = 1.0,
    ratio_level: RatioLevel = "token",
    behaviour_weight: torch.Tensor | None = None,
) -> TokenLosses:
    """Tapered off-policy REINFORCE: -A log pi for positive tokens, -sg(min(r, 1)) A log pi for the others.

    Le Roux et al., arXiv 2503.14286; `topr` of ROLL. Gradient in log_prob: -A, or -min(r, 1) A. What is
    positive is learned at full strength however unlikely it has become; what is negative is pushed away only
    as long as it is likely.

    `positive`: a boolean that broadcasts to (batch, response length); by default A > 0. The paper splits by
    the sign of what multiplies log pi, which is A here: only a negative factor can drive a log-prob down
    without end, so that is what needs the taper. A score says less. With a baseline the worse of two right
    answers has A < 0 and would go untapered, and where all scores have one sign they split nothing. For
    ROLL's split by score give `positive_scores`.
    `positive_weight`, `negative_weight`: factors of the two parts.
    `ratio_level`: r of the token (ROLL), or r of the whole answer for each of its tokens (the paper).
    `behaviour_weight`: as of `tis`. It multiplies positive tokens as well, which TOPR means to spare.
    """
    positive = advantages > 0 if positive is None else positive
    ratio = _ratio(log_prob, old_log_prob, mask, ratio_level)
    return _reinforce(
        log_prob,
        advantages,
        mask,
        weight=torch.where(positive, positive_weight, negative_weight * ratio.clamp(max=1.0)),
        truncated=~positive & (ratio > 1.0),
        behaviour_weight=behaviour_weight,
    )


def positive_scores(token_scores: torch.Tensor) -> torch.Tensor:
    """The split of `topr` by score, (batch, 1): is the sum of the scores of an answer's tokens above 0?"""
    return token_scores.sum(dim=-1, keepdim=True) > 0


def _ratio(
    log_prob: torch.Tensor, old_log_prob: torch.Tensor, mask: torch.Tensor, level: RatioLevel
) -> torch.Tensor:
    """pi / pi_old, a constant. It may be infinite: every use has a bound."""
    log_ratio = torch.where(mask, (log_prob - old_log_prob).detach(), 0.0)
    if level == "sequence":
        log_ratio = log_ratio.sum(dim=-1, keepdim=True).expand_as(log_ratio)
    return log_ratio.exp()


def _reinforce(
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    weight: torch.Tensor,
    truncated: torch.Tensor,
    behaviour_weight: torch.Tensor | None,
) -> TokenLosses:
    """-weight A log pi, with nothing but log_prob differentiable."""
    factor = -weight * advantages.detach()
    if behaviour_weight is not None:
        factor = factor * behaviour_weight.detach()
    # Both factors are cleared outside of the mask: the gradient of a product holds either of them, and 0
    # times the NaN of a padded position would be NaN again.
    loss = torch.where(mask, factor, 0.0) * torch.where(mask, log_prob, 0.0)
    return TokenLosses(loss, torch.where(mask, weight, 0.0), truncated & mask)
