# SPDX-License-Identifier: Apache-2.0
"""A pipeline folder as diffusers saves it: which family, which sizes, which schedule. Reads JSON only.

The trained part is in `transformer/`; text encoders, tokenizers and the VAE are frozen and come from disk.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .families import Family, family_of
from .schedule import NoiseSchedule

INDEX = "model_index.json"


class ModelFolder:
    """One pipeline on disk."""

    def __init__(self, path: str | Path) -> None:
        """Raises ConfigError if the folder holds no supported pipeline."""
        self.path = Path(path)
        self.family: Family = family_of(str(self._read(INDEX).get("_class_name", "folder without a class")))

    @property
    def transformer(self) -> Path:
        return self.path / "transformer"

    @property
    def tokenizer(self) -> Path:
        return self.path / "tokenizer"

    @cached_property
    def scale(self) -> int:
        """Return the pixels of an image along one side of a latent's element."""
        return int(2 ** (len(self._read("vae/config.json")["block_out_channels"]) - 1))

    def latent_shape(self, height: int, width: int) -> tuple[int, int, int]:
        """Return the shape of the latent of one image; sizes in pixels.

        Raises ConfigError if the image does not consist of whole patches.
        """
        unit = self.scale * self._patch
        if height < unit or width < unit or height % unit or width % unit:
            raise ConfigError(f"height and width must be multiples of {unit}, got {height} x {width}")
        channels = self.family.latent_channels(self._transformer_config)
        return channels, height // self.scale, width // self.scale

    def check_guidance(self, scale: float | None) -> None:
        """Raises ConfigError if the transformer has no guidance of this scale."""
        self.family.check_guidance(scale, self._transformer_config)

    def schedule(self, num_steps: int, height: int, width: int) -> NoiseSchedule:
        """Return the noise levels for an image of a size."""
        _, rows, columns = self.latent_shape(height, width)
        tokens = rows // self._patch * (columns // self._patch)
        return self.family.schedule(num_steps, self._read("scheduler/scheduler_config.json"), tokens)

    @cached_property
    def _transformer_config(self) -> dict[str, Any]:
        return self._read("transformer/config.json")

    @property
    def _patch(self) -> int:
        """Return the elements of a latent along one side of a patch; FLUX packs 2 x 2 itself."""
        return max(2, int(self._transformer_config.get("patch_size", 2)))

    def _read(self, name: str) -> dict[str, Any]:
        try:
            found = json.loads((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"actor_rollout_ref.model.path={self.path} is no pipeline of diffusers: {name} cannot be "
                f"read ({type(error).__name__}); it must be a local folder with a {INDEX}"
            ) from error
        if not isinstance(found, dict):
            raise ConfigError(f"{self.path / name} holds no JSON object")
        return found
