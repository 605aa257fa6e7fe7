# SPDX-License-Identifier: Apache-2.0
"""A second copy of the weights on the engine's device, filled while the engine generates.

It costs the device as much memory as the weights do, and makes a load a copy within the device instead of one
from host memory. The engine's own parameters stay where they are, as recorded graphs need them to.
"""

from __future__ import annotations

import threading

import torch

from .arena import ArenaReader
from .manifest import Manifest

PIECE_BYTES = 64 << 20
"""Other work gets its turn on the device between two of these."""


class Stage:
    """One version on its way to a device. Its arena must not be written until it is complete."""

    def __init__(self, reader: ArenaReader, manifest: Manifest, device: torch.device) -> None:
        self.tensors: list[tuple[str, torch.Tensor]] = []
        """By name; complete once `version` says so."""
        self._manifest, self._device = manifest, device
        # Mapped here: the reader belongs to this thread.
        self._pieces = list(reader.read(manifest, PIECE_BYTES))
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._copy, name=f"stage:v{manifest.version}", daemon=True)
        self._thread.start()

    def version(self) -> int | None:
        """The version, once it is complete. Raises what the copy raised."""
        if self._thread.is_alive():
            return None
        if self._error is not None:
            raise self._error
        return self._manifest.version

    def join(self) -> None:
        """Wait for the copy."""
        self._thread.join()

    def _copy(self) -> None:
        try:
            if self._device.type == "cuda":
                stream = torch.cuda.Stream(self._device)
                with torch.cuda.stream(stream):
                    self._copy_pieces()
                stream.synchronize()
            else:
                self._copy_pieces()
        except BaseException as error:  # noqa: BLE001  whoever asks for the version gets it
            self._error = error

    def _copy_pieces(self) -> None:
        for piece in self._pieces:
            for name, tensor in piece:
                self.tensors.append((name, tensor.to(self._device, copy=True)))
