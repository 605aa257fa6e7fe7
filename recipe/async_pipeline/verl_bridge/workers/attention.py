# SPDX-License-Identifier: Apache-2.0
"""Have FSDP train with torch's attention where flash-attn, verl's default, is not installed."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from ..rules.model_rules import has_critic

ATTENTION = "override_config.attn_implementation"
"""Below a model. verl's default is flash_attention_2."""
INSTEAD = "packed_sdpa"
"""Registered by `packed_sequences`. transformers refuses a name with `sdpa` for models that cannot use it."""
LIMIT = "attn_logit_softcapping"
ULYSSES = (
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size",
    "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size",
)


def set_attention(config: DictConfig, described: Mapping[str, Any]) -> str | None:
    """Choose the attention of the trained models unless the user has or flash-attn is installed.

    `described` is the model's `config.json`. Returns a line for the user, or None if nothing changed.
    """
    models = ["actor_rollout_ref.model", *(["critic.model"] if has_critic(config) else [])]
    unset = [
        f"{model}.{ATTENTION}" for model in models if not OmegaConf.select(config, f"{model}.{ATTENTION}")
    ]
    actor = config.actor_rollout_ref.actor
    if (
        not unset
        or config.trainer.device != "cuda"
        or actor.strategy not in ("fsdp", "fsdp2")
        or find_spec("flash_attn") is not None
    ):
        return None
    # verl's own attention for models of pictures and for shared sequences calls flash-attn in any case.
    sizes = {path: OmegaConf.select(config, path) for path in ULYSSES}
    users = [f"{path}={size}" for path, size in sizes.items() if size not in (None, 1)]
    if "vision_config" in described:
        users.append("a model of pictures")
    if limit := described.get(LIMIT):  # which sdpa ignores
        users.append(f"{LIMIT}={limit}")
    if users:
        return f"{users[0]} requires flash-attn to train; it is not installed here: install it on the nodes"
    with open_dict(config):
        for path in unset:
            OmegaConf.update(config, path, INSTEAD, force_add=True)
    return f"{unset[0]}={INSTEAD}: flash-attn is not installed here; install it, or set {unset[0]}, to choose"
