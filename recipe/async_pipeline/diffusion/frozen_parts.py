# SPDX-License-Identifier: Apache-2.0
"""The frozen parts of a pipeline: text encoders, from prompts to conditions, and the VAE, to pictures.

They are used with diffusers' own code for prompts, so that a model reads what it was trained on.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from .families import EMPTY
from .model_folder import ModelFolder


class FrozenParts:
    """Text encoders and VAE of one folder, in one process."""

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
