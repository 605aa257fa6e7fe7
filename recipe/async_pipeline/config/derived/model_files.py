# SPDX-License-Identifier: Apache-2.0
"""Read the shapes of a model from the headers of its safetensors files."""

from __future__ import annotations

import json
import struct
from math import prod
from pathlib import Path

from ...errors import ConfigError


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
