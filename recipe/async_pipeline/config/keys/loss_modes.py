# SPDX-License-Identifier: Apache-2.0
"""The off-policy losses of ROLL's `pg_variant`, each with its name in verl's registry: its `loss_mode`.

The loss of each token before verl aggregates them. A is the token's advantage, r = pi / pi_old the ratio to
the old policy, and sg(x) is x without a gradient:

    vanilla   -A log pi                                    REINFORCE (Williams 1992)
    ppo       -min(rA, clip(r, 1-e, 1+e) A)                arXiv 1707.06347
              where A < 0, at most -cA                     dual clip, arXiv 1912.09729
    tis       -sg(clip(r, lower, upper)) A log pi          truncated importance sampling, arXiv 1802.01561
    topr      -A log pi where A > 0,
              -sg(min(r, 1)) A log pi elsewhere            ROLL's form of arXiv 2503.14286
    cispo     -sg(clip(r, 1-e_low, 1+e_high)) A log pi     arXiv 2506.13585
    kimi15    -A log pi + tau/2 (log r)^2                  ROLL's form of arXiv 2501.12599

The two papers use the ratio of the whole response, the product of its tokens' ratios: TOPR in the taper
(`topr_ratio_level: sequence`), Kimi k1.5 inside the square, once per response, which nothing here computes.

verl has four of them: PPO is its `vanilla`, REINFORCE its `gpg` (here `policy_gradient`, which adds a
metric), kimi15 its `dro`, and `cispo` has the same name.
"""

from __future__ import annotations

from collections.abc import Mapping

LOSS_OF_VARIANT: Mapping[str, str] = {
    "vanilla": "policy_gradient",  # not verl's `vanilla`, which is PPO
    "ppo": "vanilla",
    "tis": "tis",
    "topr": "topr",
    "cispo": "cispo",
    "kimi15": "dro",
}
"""The loss_mode of each pg_variant."""

OWN_LOSSES = ("policy_gradient", "tis", "topr")
"""Losses that `verl_bridge.workers.loss_registry` adds to verl's registry."""

LOSS_CONFIG = "recipe.async_pipeline.verl_bridge.workers.loss_registry.OffPolicyLossConfig"
"""`actor_rollout_ref.actor.policy_loss._target_`, so that verl accepts the parameters of our losses."""
