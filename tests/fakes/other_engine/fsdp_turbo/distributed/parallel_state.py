# SPDX-License-Identifier: Apache-2.0
"""The groups of ranks: all are data-parallel."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


class ParallelState:
    """Answers what verl's engine asks."""

    def is_group_enable(self, name: str) -> bool:
        return False

    def get_data_rank(self) -> int:
        rank: int = dist.get_rank()
        return rank

    def get_data_group_size(self) -> int:
        size: int = dist.get_world_size()
        return size

    def get_data_group(self) -> Any:
        return dist.group.WORLD


def init_parallel_state(config: Any) -> None:
    """The groups exist already."""


def get_parallel_state() -> ParallelState:
    return ParallelState()
