# SPDX-License-Identifier: Apache-2.0
"""A pipeline folder as diffusers saves it: which family, which sizes, which schedule, and its frozen parts.

The trained part is in `transformer/`; text encoders, tokenizers and the VAE are frozen and come from disk.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigError
from .families import EMPTY, Family, family_of
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


class FrozenParts:
    """Text encoders, from prompts to conditions, and the VAE, to pictures, of one folder in one process.

    They are used with diffusers' own code for prompts, so that a model reads what it was trained on.
    """

    def __init__(self, pipeline: Any, max_sequence_length: int) -> None:
        """`pipeline` is a pipeline of diffusers; its transformer is not used."""
        self.pipeline, self._max_sequence_length = pipeline, max_sequence_length
        self._empty: dict[str, torch.Tensor] = {}
        for part in ("text_encoder", "text_encoder_2", "text_encoder_3", "vae"):
            module = getattr(pipeline, part, None)
            if module is not None:
                module.eval().requires_grad_(False)

    @classmethod
    def load(
        cls,
        folder: ModelFolder,
        *,
        max_sequence_length: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> FrozenParts:
        """Load all parts but the transformer, and the VAE in float32. Needs diffusers."""
        import diffusers

        of_family = getattr(diffusers, folder.family.pipeline)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the parts that are left out on purpose
            pipeline = of_family.from_pretrained(
                folder.path, transformer=None, torch_dtype=dtype, local_files_only=True
            )
        pipeline.vae.to(torch.float32)
        return cls(pipeline.to(device), max_sequence_length or folder.family.max_sequence_length)

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], *, with_empty: bool = False) -> list[dict[str, torch.Tensor]]:
        """Return the conditions of each prompt, on the CPU. A prompt's are the same in any list.

        `with_empty`: the empty prompt's are added, with `EMPTY` before their names.
        """
        if with_empty and not self._empty:
            self._empty = {EMPTY + name: one for name, one in self._encode("").items()}
        shared = self._empty if with_empty else {}
        return [{**self._encode(prompt), **shared} for prompt in prompts]

    def _encode(self, prompt: str) -> dict[str, torch.Tensor]:
        # One prompt for all encoders.
        of_family: dict[str, Any] = {"prompt_2": None}
        if hasattr(self.pipeline, "tokenizer_3"):
            of_family |= {"prompt_3": None, "do_classifier_free_guidance": False}
        found = self.pipeline.encode_prompt(
            prompt=prompt, max_sequence_length=self._max_sequence_length, **of_family
        )
        states, pooled = (found[0], found[2]) if "prompt_3" in of_family else (found[0], found[1])
        return {"encoder_hidden_states": states[0].cpu(), "pooled_projections": pooled[0].cpu()}

    @torch.no_grad()
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Return pictures of latents: uint8 (rows, 3, height, width), on the CPU."""
        vae = self.pipeline.vae
        plain = latents.to(vae.device, vae.dtype) / vae.config.scaling_factor
        pictures = vae.decode(plain + (vae.config.shift_factor or 0.0), return_dict=False)[0]
        return as_picture(pictures)


def as_picture(values: torch.Tensor) -> torch.Tensor:
    """Return values in [-1, 1] as uint8 on the CPU."""
    return ((values.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).cpu()
