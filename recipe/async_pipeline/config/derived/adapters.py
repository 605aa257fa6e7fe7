# SPDX-License-Identifier: Apache-2.0
"""LoRA in verl's config: the rank, what is published, and how much that is."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ..paths import select


def tensor_shapes(model: Path) -> dict[str, list[int]]:
    """Return the shape of each tensor of a model by its name, or nothing without files.

    Of a pipeline of diffusers, which has a folder for each of its parts, the transformer's. Raises
    ConfigError if a file is damaged.
    """
    files = sorted(model.glob("*.safetensors")) or sorted(model.glob("transformer/*.safetensors"))
    return {name: shape for file in files for name, shape in _shapes(file).items()}


def count_parameters(model: Path) -> int | None:
    """Count the parameters of a model, or return None without files."""
    shapes = tensor_shapes(model)
    return sum(map(prod, shapes.values())) if shapes else None


def _shapes(file: Path) -> dict[str, list[int]]:
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length))
    except (struct.error, ValueError, OverflowError, MemoryError):
        raise ConfigError(f"{file} must be a safetensors file, but is damaged; copy it again") from None
    return {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}


MODEL = "actor_rollout_ref.model"
ASSUMED_RANK = 32
"""The rank that a plan assumes for an adapter on another machine."""
ALL_LINEAR = "all-linear"
"""peft's name for every linear layer but the output head."""
EXPERTS = ".experts."
"""Part of the names of a mixture of experts."""
NO_LAYERS = re.compile(r"embed|(^|\.)(wte|wpe|lm_head)$")
"""Matrices that are no linear layers, or that `ALL_LINEAR` leaves out."""


def adapter_rank(config: Mapping[str, Any]) -> int:
    """Return the rank of the adapters, or 0 if all weights are trained."""
    return int(select(config, f"{MODEL}.lora.rank") or select(config, f"{MODEL}.lora_rank") or 0)


def publishes_adapters(config: Mapping[str, Any]) -> bool:
    """Return whether adapters are published without their base."""
    return adapter_rank(config) > 0 and not select(config, f"{MODEL}.lora.merge")


def rank_in(adapter: Path) -> int | None:
    """Return the rank of a saved adapter, or None if this is not the folder of one."""
    try:
        rank = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))["r"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return rank if isinstance(rank, int) and rank > 0 else None


def count_adapter_parameters(
    model: Path, rank: int, targets: str | Sequence[str], excluded: str | Sequence[str] | None = None
) -> int | None:
    """Count the parameters of the adapters of a model.

    Returns None without its safetensors files, and for a mixture of experts: peft fuses their layers.

    `targets` and `excluded` are peft's `target_modules` and `exclude_modules`. A layer of shape
    [outputs, inputs] gets two matrices, [rank, inputs] and [outputs, rank].
    """
    shapes = tensor_shapes(model)
    if not shapes or any(EXPERTS in name for name in shapes):
        return None
    return sum(
        rank * sum(shape)
        for name, shape in shapes.items()
        if len(shape) == 2
        and name.endswith(".weight")
        and _is_target(name.removesuffix(".weight"), targets)
        and not (excluded and _matches(name.removesuffix(".weight"), excluded))
    )


def _is_target(module: str, targets: str | Sequence[str]) -> bool:
    return not NO_LAYERS.search(module) if targets == ALL_LINEAR else _matches(module, targets)


def _matches(module: str, chosen: str | Sequence[str]) -> bool:
    """Return whether a module is chosen, as peft does: a text is a pattern, a list has ends of names."""
    if isinstance(chosen, str):
        return re.fullmatch(chosen, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in chosen)


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
