# SPDX-License-Identifier: Apache-2.0
"""What an engine computes from a version, such as quantized weights, computed while it generates.

The engine's loader takes the results instead of the published tensors, so a commit copies and computes
nothing. They need as much memory of the device as they have bytes, of whole tensors, until they are served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from ...memory.manifest import Manifest
from .standby_version import StandbyVersion, side_stream

Named = tuple[str, torch.Tensor]
Converted = Mapping[str, Sequence[Named]]
"""What takes the place of a published tensor in the engine's loader, by its name."""
Convert = Callable[[Mapping[str, torch.Tensor]], Converted]
"""Converts some of a version's tensors, from whole published ones in host memory."""


class StandbyConversion(StandbyVersion):
    """The converted tensors of one version."""

    def __init__(self, convert: Convert, device: torch.device) -> None:
        super().__init__()
        self._convert, self._device = convert, device
        self._converted: Converted = {}

    def stage(self, manifest: Manifest, published: Mapping[str, torch.Tensor]) -> None:
        """Convert a version."""
        self.discard()  # frees the memory of an older version first
        with side_stream(self._device):
            self._converted = self._convert(published)
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()

    def discard(self) -> None:
        """Free the results."""
        self._converted = {}

    def take(self) -> Converted:
        """Return the results, which this object no longer keeps."""
        converted, self._converted = self._converted, {}
        self.served()
        return converted


def replaced(piece: Iterable[Named], converted: Converted) -> list[Named]:
    """Return published tensors with their conversions in their places."""
    return [named for name, tensor in piece for named in converted.get(name, [(name, tensor)])]
