# SPDX-License-Identifier: Apache-2.0
"""Tell in verl's files of generations who wrote which part of a response, and whose prompt it was.

verl decodes a response as a whole. The files get more columns:

    turns         the parts of a response in order, each `[written by the policy, text, version that wrote
                  it]`, the version null if none did or it is unknown; null if all is one part of the policy
    turn_rewards  of each turn of the policy; null if only the response as a whole has a reward
    place         `index` and `seed` of the row's extra_info, as far as it has them
    pictures      files with the pictures of the prompt, below the folder; of a model with a processor
    others        what the reward function returned besides the score, as in verl's files of validations
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import torch
import transfer_queue as tq
import xxhash

from ....core.groups.items import StepBatch, Trajectory
from ....observe.run_directory.picture_folder import Picture, PictureFolder
from ...agent_loop.diffusion_loop import prompt_of
from ...rollout.diffusers.fields import PICTURE
from ..batches.verl_stages import own_copy

PICTURES = 4
"""Pictures of a step: the first sample of as many prompts."""
OF_PROMPTS = "pictures"
"""The folder of pictures of prompts, next to the files of verl's generations."""
LONGEST_SIDE = 256
"""Pixels; larger pictures are kept smaller."""
NAME_CHARACTERS = 200
"""Of the path or address of a picture."""


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

    A picture that the data names by a path or address is not written, and has that name; of a data URI
    that is its beginning.
    """
    names = []
    contents = (message.get("content") for message in messages)
    # A turn that only calls tools has none.
    for part in chain.from_iterable(content for content in contents if isinstance(content, list)):
        if part.get("type") != "image":
            continue
        image = part.get("image")
        if not hasattr(image, "convert"):
            names.append(str(image)[:NAME_CHARACTERS])
            continue
        copy = image.convert("RGB")
        name = f"{OF_PROMPTS}/{xxhash.xxh3_64_hexdigest(copy.tobytes())}-{copy.width}x{copy.height}.png"
        if not (folder / name).exists():
            (folder / OF_PROMPTS).mkdir(parents=True, exist_ok=True)
            _save(copy, folder / name)
        names.append(name)
    return names


INFO, PLACE = "extra_info", ("index", "seed")
MESSAGES = "raw_prompt"
EXTRA, REWARD = "extra_fields", "reward_extra_info"


def log_rollout_data(view: Any, batch: StepBatch, timing: dict[str, float], folder: str) -> None:
    """Have verl write the generations of a step. Blocks. `view`: verl's trainer, for this call only."""
    dump = view._dump_generations

    def with_columns(*, reward_extra_infos_dict: dict[str, list[Any]], **more: Any) -> None:
        columns = _columns(view, batch, reward_extra_infos_dict["uid"], Path(folder))
        dump(reward_extra_infos_dict={**columns, **reward_extra_infos_dict}, **more)

    view._dump_generations = with_columns
    view._log_rollout_data(own_copy(batch.payload), timing, folder)


def _columns(view: Any, batch: StepBatch, keys: Sequence[str], folder: Path) -> dict[str, list[Any]]:
    """Return the further columns of rows with these keys. Blocks on the sample store."""
    names = {name for group in batch.groups for columns in group.payload or () for name in columns}
    spans = {one.key: one.spans or () for group in batch.groups for one in group.trajectories}
    # Not `response_mask`, which has lost the tokens that are too old.
    further = (INFO, EXTRA, *([MESSAGES] if view.processor is not None else []))
    fields = ["responses", "loss_mask", "rm_scores", *(name for name in further if name in names)]
    data = tq.kv_batch_get(keys=list(keys), partition_id=batch.payload.partition_id, select_fields=fields)

    rows = zip(keys, data["responses"].unbind(0), data["loss_mask"].unbind(0), strict=True)
    found = _of_rewards(data[EXTRA]) if EXTRA in names else {}
    found["turns"] = [
        _turns(view.tokenizer, ids.tolist(), mask.tolist(), spans.get(key, ())) for key, ids, mask in rows
    ]
    found["turn_rewards"] = [
        _turn_rewards(mask.tolist(), scores.tolist())
        for mask, scores in zip(data["loss_mask"].unbind(0), data["rm_scores"].unbind(0), strict=True)
    ]
    if INFO in names:
        found["place"] = [_place(getattr(info, "data", info)) for info in data[INFO]]
    if MESSAGES in fields:
        found["pictures"] = [of_prompt(getattr(one, "data", one), folder) for one in data[MESSAGES]]
    return found


def _of_rewards(extra_fields: Iterable[Any]) -> dict[str, list[Any]]:
    """Return the values of the reward function by name, None for rows that lack one."""
    told = [getattr(fields, "data", fields) for fields in extra_fields]
    rows = [(fields.get(REWARD) if isinstance(fields, Mapping) else None) or {} for fields in told]
    return {name: [row.get(name) for row in rows] for name in dict.fromkeys(chain.from_iterable(rows))}


def _turns(
    tokenizer: Any, ids: Sequence[int], mask: Sequence[int], spans: Sequence[tuple[int, int]]
) -> list[Any] | None:
    parts = [*_parts(ids, mask, spans)]
    if len(parts) == 1 and all(mask):
        return None
    turns: list[Any] = []
    for own, group in groupby(parts, key=lambda part: part[0]):
        turn = [*group]
        tokens: list[int] = []
        before = ""
        for at, (_, version, part) in enumerate(turn, start=1):
            tokens += part
            text = tokenizer.decode(tokens, skip_special_tokens=True)
            if at < len(turn):
                # A character of which the next version wrote the rest belongs to that one.
                text = text.rstrip("\ufffd")
            turns.append([own, text[len(before) :], version])
            before = text
    return turns


def _turn_rewards(mask: Sequence[int], scores: Sequence[float]) -> list[float] | None:
    own = groupby(zip(mask, scores, strict=True), key=lambda one: bool(one[0]))
    rewards = [round(sum(score for _, score in turn), 6) for is_own, turn in own if is_own]
    return rewards if any(rewards[:-1]) else None


def _parts(
    ids: Sequence[int], mask: Sequence[int], spans: Sequence[tuple[int, int]]
) -> Iterator[tuple[bool, int | None, list[int]]]:
    """Yield the longest parts of one writer: whether it is the policy, its version, and the tokens."""
    starts = [start for _, start in spans]

    def writer(at: int) -> tuple[bool, int | None]:
        before = bisect_right(starts, at)
        return bool(mask[at]), spans[before - 1][0] if mask[at] and before else None

    for (own, version), part in groupby(range(len(ids)), key=writer):
        yield own, version, [ids[at] for at in part]


def _place(info: Any) -> dict[str, Any]:
    known = info if isinstance(info, Mapping) else {}
    return {name: known[name] for name in PLACE if known.get(name) is not None}
