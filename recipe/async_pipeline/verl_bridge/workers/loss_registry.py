# SPDX-License-Identifier: Apache-2.0
"""Our policy losses in verl's registry, and the config section that lets their parameters in.

Importing this registers them. verl's own `PolicyLossConfig` refuses a key that it does not know; naming ours
as `actor_rollout_ref.actor.policy_loss._target_` admits the parameters of `tis` and `topr`, and imports this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

import torch
from verl.trainer.ppo.core_algos import agg_loss, compute_policy_loss_gpg, register_policy_loss
from verl.utils.torch_functional import masked_mean
from verl.workers.config import PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

from ...config.rollout_correction import POLICY_LOSS, check_loss_parameters
from ...errors import ConfigError
from . import losses

Metrics = dict[str, float]
Computed = tuple[losses.TokenLosses, Mapping[str, torch.Tensor]]
"""The losses, and what else is to be averaged over the tokens, by the name of the metric."""


@dataclass
class OffPolicyLossConfig(PolicyLossConfig):
    """verl's section with the parameters of `tis` and `topr`. Raises ConfigError: one is out of range."""

    tis_lower_bound: float = 0.0
    """Least weight of a token in `tis`."""
    tis_upper_bound: float = 1.0
    """Greatest weight of a token in `tis`."""
    topr_positive_weight: float = 1.0
    """Factor of the positive part of `topr`."""
    topr_negative_weight: float = 1.0
    """Factor of the negative part of `topr`."""
    topr_split: str = "advantage"
    """What makes a token positive: its advantage, or its answer's score (needs `ppo_loss_with_scores`)."""
    topr_ratio_level: str = "token"
    """Whose ratio tapers a negative token: its own, or that of its whole answer (sequence)."""

    def __post_init__(self) -> None:
        check_loss_parameters(vars(self))


_positive: ContextVar[torch.Tensor | None] = ContextVar("positive", default=None)
"""Which answers of the micro-batch in work scored above 0, (batch, 1)."""


def ppo_loss_with_scores(
    config: Any, model_output: Any, data: Any, dp_group: Any = None
) -> tuple[Any, dict[str, Any]]:
    """verl's `ppo_loss`, which hands scores to no policy loss, in a context where `topr` finds them.

    A worker gives this to `set_loss_fn` in place of verl's. `data` is a micro-batch with the column
    `rm_scores`, jagged (batch, response length), which is read only where `topr_split` is score.
    """
    positive = None
    if config.policy_loss.get("topr_split") == "score":
        positive = losses.positive_scores(data.select("rm_scores").to_padded_tensor()["rm_scores"])
    token = _positive.set(positive)
    try:
        loss, metrics = ppo_loss(config, model_output, data, dp_group)
    finally:
        _positive.reset(token)
    return loss, metrics


def _registered(name: str) -> Callable[[Callable[..., Computed]], Callable[..., Computed]]:
    """Give a loss of tokens verl's signature, aggregation and metrics."""

    def register(compute: Callable[..., Computed]) -> Callable[..., Computed]:
        @register_policy_loss(name)
        def policy_loss(
            old_log_prob: torch.Tensor,
            log_prob: torch.Tensor,
            advantages: torch.Tensor,
            response_mask: torch.Tensor,
            loss_agg_mode: str = "token-mean",
            config: Any = None,
            rollout_is_weights: torch.Tensor | None = None,
        ) -> tuple[torch.Tensor, Metrics]:
            tokens, extra = compute(
                _parameters(config),
                log_prob=log_prob,
                old_log_prob=old_log_prob,
                advantages=advantages,
                mask=response_mask.bool(),
                behaviour_weight=rollout_is_weights,
            )
            loss = agg_loss(
                loss_mat=tokens.loss,
                loss_mask=response_mask,
                loss_agg_mode=loss_agg_mode,
                **config.global_batch_info,
            )
            weights = {"pg_clipfrac": tokens.truncated.float(), f"{name}_weight_mean": tokens.weight}
            averaged = {"ppo_kl": old_log_prob - log_prob, **weights, **extra}
            return loss, _means(averaged, response_mask)

        return compute

    return register


@_registered("tis")
def _tis(own: OffPolicyLossConfig, **tensors: torch.Tensor) -> Computed:
    return losses.tis(lower=own.tis_lower_bound, upper=own.tis_upper_bound, **tensors), {}


@_registered("topr")
def _topr(own: OffPolicyLossConfig, **tensors: torch.Tensor) -> Computed:
    positive = tensors["advantages"] > 0
    if own.topr_split == "score":
        positive = _positive_answers().expand_as(positive)
    tokens = losses.topr(
        positive=positive,
        positive_weight=own.topr_positive_weight,
        negative_weight=own.topr_negative_weight,
        ratio_level=cast("losses.RatioLevel", own.topr_ratio_level),
        **tensors,
    )
    return tokens, {"topr_positive_frac": positive.float()}


@register_policy_loss("policy_gradient")
def policy_gradient(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Metrics]:
    """verl's `gpg`, -A log pi with gradient -A, and how far the old policy is, which `gpg` does not say."""
    loss, metrics = compute_policy_loss_gpg(
        old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights
    )
    return loss, {**metrics, **_means({"ppo_kl": old_log_prob - log_prob}, response_mask)}


def _parameters(config: Any) -> OffPolicyLossConfig:
    """Of the section as it came. Raises TypeError: a key that neither we nor verl know."""
    section = config.policy_loss
    return section if isinstance(section, OffPolicyLossConfig) else OffPolicyLossConfig(**section)


def _positive_answers() -> torch.Tensor:
    positive = _positive.get()
    if positive is None:
        raise ConfigError(
            f"{POLICY_LOSS}.topr_split must be advantage where no scores reach the loss, got 'score'; "
            "let the worker use ppo_loss_with_scores"
        )
    return positive


def _means(of_tokens: Mapping[str, torch.Tensor], mask: torch.Tensor) -> Metrics:
    # Names must hold neither "max" nor "min": verl would not average them over the micro-batches.
    return {f"actor/{name}": masked_mean(values, mask).detach().item() for name, values in of_tokens.items()}
