# SPDX-License-Identifier: Apache-2.0
"""This package's policy losses in verl's registry, and the config section that admits their parameters.

Importing this module registers them. verl's own `PolicyLossConfig` rejects unknown keys; setting
`actor_rollout_ref.actor.policy_loss._target_` to the class here admits the parameters of `tis` and
`topr`, and imports this module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

import torch
from verl.trainer.distillation import distillation_ppo_loss
from verl.trainer.ppo.core_algos import agg_loss, compute_policy_loss_gpg, register_policy_loss
from verl.utils.metric import Metric
from verl.utils.torch_functional import masked_mean
from verl.workers.config import PolicyLossConfig
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding

from ...config.checks.rollout_correction import POLICY_LOSS, check_loss_parameters
from ...errors import ConfigError
from . import losses

KL = "kl"
"""Entry of a model's output: a divergence for each token, in verl's layout of log-probs."""
LossMetrics = dict[str, float]
LossesAndMetrics = tuple[losses.TokenLosses, Mapping[str, torch.Tensor]]
"""The losses, and further values to average over the tokens, by metric name."""


@dataclass
class OffPolicyLossConfig(PolicyLossConfig):
    """verl's section with the parameters of `tis` and `topr`. Raises ConfigError if one is out of range."""

    tis_lower_bound: float = 0.0
    """Least weight of a token in `tis`."""
    tis_upper_bound: float = 1.0
    """Greatest weight of a token in `tis`."""
    topr_positive_weight: float = 1.0
    """Factor of the positive part of `topr`."""
    topr_negative_weight: float = 1.0
    """Factor of the negative part of `topr`."""
    topr_split: str = "advantage"
    """What makes a token positive: its advantage, or its response's score (needs `ppo_loss_with_scores`).
    """
    topr_ratio_level: str = "token"
    """Whose ratio tapers a negative token: the token's, or the whole response's (sequence)."""

    def __post_init__(self) -> None:
        check_loss_parameters(vars(self))


_positive: ContextVar[torch.Tensor | None] = ContextVar("positive", default=None)
"""Which responses of the current micro-batch scored above 0, (batch, 1)."""


def ppo_loss_with_scores(
    config: Any, model_output: Any, data: Any, dp_group: Any = None
) -> tuple[Any, dict[str, Any]]:
    """Compute verl's `ppo_loss`, which passes no scores to a policy loss, with scores available to
    `topr`.

    A worker passes this to `set_loss_fn` instead of verl's. `data` is a micro-batch with the column
    `rm_scores`, jagged (batch, response length), which is read only if `topr_split` is score. If the model's
    output has a `KL`, its mean is added, times `kl_loss_coef`.
    """
    positive = None
    if config.policy_loss.get("topr_split") == "score":
        positive = losses.positive_scores(data.select("rm_scores").to_padded_tensor()["rm_scores"])
    token = _positive.set(positive)
    try:
        loss, metrics = ppo_loss(config, model_output, data, dp_group)
    finally:
        _positive.reset(token)
    if KL in model_output:
        mask = data.select("response_mask").to_padded_tensor()["response_mask"].bool()
        kl = no_padding_2_padding(model_output[KL], data)
        mean = agg_loss(kl, mask, config.loss_agg_mode, **config.global_batch_info)
        loss = loss + config.kl_loss_coef * mean
        added = Metric(value=mean, aggregation=metrics["actor/pg_loss"].aggregation)
        metrics |= {"kl_loss": added, "kl_coef": config.kl_loss_coef}
    return loss, metrics


WEIGHTS = "rollout_is_weights"
"""The column of the weights of the rollout correction, jagged (batch, response length)."""


def distillation_loss(*, data: Any, **arguments: Any) -> Any:
    """Compute verl's `distillation_ppo_loss`, whose policy gradient cannot read jagged weights.

    It is also called for the logits of a micro-batch, which the engine does not keep.
    """
    if WEIGHTS in data and data[WEIGHTS].is_nested:
        data = data.copy()
        data[WEIGHTS] = data[WEIGHTS].to_padded_tensor(0.0)
    return distillation_ppo_loss(data=data, **arguments)


def _registered(name: str) -> Callable[[Callable[..., LossesAndMetrics]], Callable[..., LossesAndMetrics]]:
    """Give a token loss verl's signature, aggregation and metrics."""

    def register(compute: Callable[..., LossesAndMetrics]) -> Callable[..., LossesAndMetrics]:
        @register_policy_loss(name)
        def policy_loss(
            old_log_prob: torch.Tensor,
            log_prob: torch.Tensor,
            advantages: torch.Tensor,
            response_mask: torch.Tensor,
            loss_agg_mode: str = "token-mean",
            config: Any = None,
            rollout_is_weights: torch.Tensor | None = None,
        ) -> tuple[torch.Tensor, LossMetrics]:
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
def _tis(own: OffPolicyLossConfig, **tensors: torch.Tensor) -> LossesAndMetrics:
    return losses.tis(lower=own.tis_lower_bound, upper=own.tis_upper_bound, **tensors), {}


@_registered("topr")
def _topr(own: OffPolicyLossConfig, **tensors: torch.Tensor) -> LossesAndMetrics:
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
) -> tuple[torch.Tensor, LossMetrics]:
    """verl's `gpg`, -A log pi with gradient -A, plus metrics of the distance to the old policy."""
    loss, metrics = compute_policy_loss_gpg(
        old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights
    )
    return loss, {**metrics, **_means({"ppo_kl": old_log_prob - log_prob}, response_mask)}


def _parameters(config: Any) -> OffPolicyLossConfig:
    """Return the parameters of the config section. Raises TypeError for a key that neither side knows."""
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


def _means(of_tokens: Mapping[str, torch.Tensor], mask: torch.Tensor) -> LossMetrics:
    # Metric names must contain neither "max" nor "min": verl would not average them over micro-batches.
    return {f"actor/{name}": masked_mean(values, mask).detach().item() for name, values in of_tokens.items()}
