# SPDX-License-Identifier: Apache-2.0
"""Off-policy token losses that verl lacks. `config/keys/foreign_keys.py` has ROLL's names of them.

Every tensor is (batch, response length). Log-probs are of the generated tokens: `log_prob` under
the policy in training, `old_log_prob` under the reference policy of the ratio. To correct for the age of
a sample, the latter must be the policy that generated it (verl:
`algorithm.rollout_correction.bypass_mode=True`); with log-probs that the trainer computes at the start of
its step, only the drift within the step is corrected.

Gradient flows through the factor `log_prob` alone. The ratio that weights it is a constant: a token
beyond a bound still contributes, with a bounded weight, where PPO would drop it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

RatioLevel = Literal["token", "sequence"]
"""Whether a token's ratio is that token's, or that of all tokens of its response together."""


class TokenLosses(NamedTuple):
    """The loss of each token and its factors; 0 outside the mask, regardless of the input there."""

    loss: torch.Tensor
    """To be minimised; the caller aggregates."""
    weight: torch.Tensor
    """The factor of -A log pi, without the behaviour weight."""
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

    `upper` bounds the weight of a token that became more likely, and so the variance; at 1 no token counts
    more than it was sampled. `lower` keeps tokens that became unlikely in the sum: a bias, none at 0.
    `behaviour_weight`: a further constant factor of each token, pi_old / pi_behaviour if the two differ.
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

    Le Roux et al., arXiv 2503.14286; `topr` of ROLL. Gradient in log_prob: -A, or -min(r, 1) A. A positive
    token is learned at full strength however unlikely it has become; a negative one is pushed away only as
    long as it is likely.

    `positive`: a boolean that broadcasts to (batch, response length); by default A > 0. The paper splits by
    the sign of what multiplies log pi, which is A here: only a negative factor can drive a log-prob down
    without end, so that is what needs the taper. A score says less. With a baseline, the worse of two correct
    responses has A < 0 and would not be tapered, and scores of one sign split nothing. For ROLL's split by
    score pass `positive_scores`.
    `positive_weight`, `negative_weight`: factors of the two parts.
    `ratio_level`: r of the token (ROLL), or r of the whole response for each of its tokens (the paper).
    `behaviour_weight`: as in `tis`. It multiplies positive tokens too, which TOPR exempts.
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
    """Split for `topr` by score, (batch, 1): whether the scores of a response's tokens sum above 0."""
    return token_scores.sum(dim=-1, keepdim=True) > 0


def _ratio(
    log_prob: torch.Tensor, old_log_prob: torch.Tensor, mask: torch.Tensor, level: RatioLevel
) -> torch.Tensor:
    """Return pi / pi_old, a constant. It may be infinite: every use has a bound."""
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
    """Return -weight A log pi, with nothing but log_prob differentiable."""
    factor = -weight * advantages.detach()
    if behaviour_weight is not None:
        factor = factor * behaviour_weight.detach()
    # Mask both factors: the gradient of a product contains each of them, and 0 times the NaN of a padded
    # position would be NaN again.
    loss = torch.where(mask, factor, 0.0) * torch.where(mask, log_prob, 0.0)
    return TokenLosses(loss, torch.where(mask, weight, 0.0), truncated & mask)
