# SPDX-License-Identifier: Apache-2.0
"""LoRA in verl's config: whether adapters are trained, and who must have them.

Three forms of a policy with adapters exist in a run. The trainer holds the base and the adapters. Rollout
replicas hold the base, and get the adapters alone or, with `lora.merge`, whole merged weights. The
reference is the base: on the training devices it is the trainer's model with its adapters switched off, as
in verl; on separate devices it is a model without them.
"""

from __future__ import annotations

import copy

from omegaconf import DictConfig, OmegaConf


def without_adapters(config: DictConfig) -> DictConfig:
    """Return a copy of `actor_rollout_ref` for a model that gets no adapters."""
    made = copy.deepcopy(config)
    OmegaConf.set_struct(made, False)
    made.model.update(lora_rank=0, lora_adapter_path=None)
    if made.model.get("lora") is not None:
        made.model.lora.rank = 0
    return made
