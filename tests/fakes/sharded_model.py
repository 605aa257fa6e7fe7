# SPDX-License-Identifier: Apache-2.0
"""A small model that tests shard, and how it is trained."""

from __future__ import annotations

import torch

VERSIONS = 3


def make_model() -> torch.nn.Module:
    """Return a model with sizes that the ranks do not divide, one smaller than their number, and a buffer."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 1), torch.nn.Linear(1, 300)
    )
    model.register_buffer("steps", torch.tensor(3))
    return model


def train(model: torch.nn.Module, version: int) -> None:
    """Change the parameters."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(version)
