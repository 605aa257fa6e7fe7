# SPDX-License-Identifier: Apache-2.0
"""The sharding."""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp import fully_shard


class FSDPTurbo:
    """Shards a decoder's layers, and the rest together."""

    def __init__(self, config: Any, module: Any) -> None:
        for layer in module.model.layers:
            fully_shard(layer)
        self.model = fully_shard(module)
