# SPDX-License-Identifier: Apache-2.0
"""verl's config of a Megatron engine, which also permits float32."""

from __future__ import annotations

from dataclasses import dataclass

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
