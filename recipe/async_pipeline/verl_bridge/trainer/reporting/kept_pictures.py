# SPDX-License-Identifier: Apache-2.0
"""Keep pictures for people: some that a policy drew, for the report, and those in prompts, for `episodes`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import transfer_queue as tq
import xxhash

from ....core.groups.items import StepBatch, Trajectory
from ....observe.run_directory.picture_folder import Picture, PictureFolder
from ...agent_loop.diffusion_loop import prompt_of
from ...rollout.diffusers.fields import PICTURE

PICTURES = 4
"""Pictures of a step: the first sample of as many prompts."""
OF_PROMPTS = "pictures"
"""The folder of pictures of prompts, next to the files of verl's generations."""
LONGEST_SIDE = 256
"""Pixels; larger pictures are kept smaller."""


class KeptPictures:
    """Takes pictures out of the sample store, before the samples of a step are freed."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = PictureFolder(run_dir)

    def keep(self, batch: StepBatch) -> None:
        """Write pictures of the first prompts of a batch. Blocks on the sample store."""
        chosen = [found for group in batch.groups if (found := _first(group.trajectories)) is not None]
        chosen = sorted(chosen, key=lambda one: one.key)[:PICTURES]
        if not chosen:
            return
        data = tq.kv_batch_get(
            keys=[one.key for one in chosen],
            partition_id=batch.payload.partition_id,
            select_fields=["extra_fields", "raw_prompt"],
        )
        kept = []
        for number, (one, extra, messages) in enumerate(
            zip(chosen, _values(data["extra_fields"]), _values(data["raw_prompt"]), strict=True)
        ):
            if PICTURE not in extra:
                continue
            about = Picture(
                step=batch.step,
                file=f"{batch.step:06}-{number}.png",
                prompt=prompt_of(messages),
                reward=one.reward,
                first_version=one.first_version,
                last_version=one.last_version,
            )
            _write(extra[PICTURE], self._folder.place_of(about))
            kept.append(about)
        self._folder.add(kept)


def _first(trajectories: tuple[Trajectory, ...]) -> Trajectory | None:
    """Return the trajectory of the first session, whose picture is in the sample store."""
    return next((one for one in trajectories if one.key.rsplit("_", 2)[1] == "0"), None)


def _values(column: Any) -> list[Any]:
    """Return the Python objects of a column, which may be wrapped one by one."""
    return [getattr(value, "data", value) for value in column]


def _write(picture: Any, path: Path) -> None:
    """Write a picture, uint8 (3, height, width), as PNG."""
    from PIL import Image

    pixels = torch.as_tensor(picture).permute(1, 2, 0).contiguous().numpy()
    _save(Image.fromarray(pixels), path)


def _save(image: Any, path: Path) -> None:
    """Write a picture of Pillow, smaller if it is large. Changes the picture."""
    image.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    image.save(path)


def of_prompt(messages: Sequence[Mapping[str, Any]], folder: Path) -> list[str]:
    """Write the pictures of a prompt below `folder`, each once, and return their names there.

    A picture that the data names by a path or address is not written, and has that name.
    """
    names = []
    contents = (message.get("content") for message in messages)
    # A turn that only calls tools has none.
    for part in chain.from_iterable(content for content in contents if isinstance(content, list)):
        if part.get("type") != "image":
            continue
        image = part.get("image")
        if not hasattr(image, "convert"):
            names.append(str(image))
            continue
        copy = image.convert("RGB")
        name = f"{OF_PROMPTS}/{xxhash.xxh3_64_hexdigest(copy.tobytes())}-{copy.width}x{copy.height}.png"
        if not (folder / name).exists():
            (folder / OF_PROMPTS).mkdir(parents=True, exist_ok=True)
            _save(copy, folder / name)
        names.append(name)
    return names
