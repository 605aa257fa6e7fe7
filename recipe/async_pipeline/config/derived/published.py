# SPDX-License-Identifier: Apache-2.0
"""How much a run publishes: the parameters and the bytes of a version, and the host memory for them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..paths import select
from .adapters import MODEL, adapter_rank, count_adapter_parameters, count_parameters, publishes_adapters

ARENAS = 2
"""Host copies of the weights on the trainer's side."""
ITEM_BYTES = {
    "float32": 4,
    "fp32": 4,
    "float16": 2,
    "fp16": 2,
    "half": 2,
    "bfloat16": 2,
    "bf16": 2,
    "auto": 2,
}


def model_parameters(config: Mapping[str, Any]) -> int | None:
    """Count the parameters of the model, or return None if it is not on this machine."""
    return count_parameters(_model(config))


def published_parameters(config: Mapping[str, Any]) -> int | None:
    """Count the parameters of a version, the model's or its adapters', or return None if it is unknown."""
    if not publishes_adapters(config):
        return model_parameters(config)
    section = select(config, MODEL)
    targets, excluded = section.get("target_modules") or "all-linear", section.get("exclude_modules")
    return count_adapter_parameters(_model(config), adapter_rank(config), targets, excluded)


def version_bytes(config: Mapping[str, Any]) -> int | None:
    """Return the bytes of a version, or None if they are unknown."""
    parameters = published_parameters(config)
    item = ITEM_BYTES.get(str(select(config, "actor_rollout_ref.rollout.dtype")), 2)
    return None if parameters is None else parameters * item


def arena_bytes(config: Mapping[str, Any]) -> int | None:
    """Return the shared memory of the trainer's node for published weights, or None if it is unknown."""
    nbytes = version_bytes(config)
    return None if nbytes is None else ARENAS * nbytes


def _model(config: Mapping[str, Any]) -> Path:
    return Path(str(select(config, f"{MODEL}.path"))).expanduser()
