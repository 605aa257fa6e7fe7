# SPDX-License-Identifier: Apache-2.0
"""verl's config of a Megatron engine, which also permits float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.workers.config import McoreEngineConfig


@dataclass
class Float32EngineConfig(McoreEngineConfig):
    """Select it as `_target_` of a `megatron` section whose dtype is float32.

    verl refuses float32 in the config only; its engine and megatron-core's optimizer support it.
    """

    def __post_init__(self) -> None:
        dtype = self.dtype
        if dtype != "float32":
            super().__post_init__()
            return
        # Fields of a config cannot be changed after it is made.
        object.__setattr__(self, "dtype", "bfloat16")
        super().__post_init__()
        object.__setattr__(self, "dtype", dtype)


def set_rotary_base(engine_config: Any, hf_config: Any) -> None:
    """Set the base in the overrides of a Megatron engine's config, unless the user has set one."""
    from verl.utils.megatron_utils import get_hf_rope_theta

    try:
        base = get_hf_rope_theta(hf_config)
    except (AttributeError, ValueError):
        # A model without rotary embeddings.
        return
    engine_config.override_transformer_config.setdefault("rotary_base", base)
