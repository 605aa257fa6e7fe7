# SPDX-License-Identifier: Apache-2.0
"""Tell in verl's files of generations who wrote which part of a response, and whose prompt it was.

verl decodes a response as a whole. The files get two more columns:

    turns   the parts of a response in order, each `[written by the policy, text]`; null if it wrote all of it
    place   `index` and `seed` of the row's extra_info, as far as it has them
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import transfer_queue as tq

from ...core.items import StepBatch
from .verl_stages import own_copy

INFO, PLACE = "extra_info", ("index", "seed")


def log_rollout_data(view: Any, batch: StepBatch, timing: dict[str, float], folder: str) -> None:
    """Have verl write the generations of a step. Blocks. `view`: verl's trainer, for this call only."""
    dump = view._dump_generations

    def with_columns(*, reward_extra_infos_dict: dict[str, list[Any]], **more: Any) -> None:
        columns = _columns(view.tokenizer, batch, reward_extra_infos_dict["uid"])
        dump(reward_extra_infos_dict={**reward_extra_infos_dict, **columns}, **more)

    view._dump_generations = with_columns
    view._log_rollout_data(own_copy(batch.payload), timing, folder)


def _columns(tokenizer: Any, batch: StepBatch, keys: Sequence[str]) -> dict[str, list[Any]]:
    """Return the further columns of rows with these keys. Blocks on the sample store."""
    names = {name for group in batch.groups for columns in group.payload or () for name in columns}
    # Not `response_mask`, which has lost the tokens that are too old.
    fields = ["responses", "loss_mask", *([INFO] if INFO in names else [])]
    data = tq.kv_batch_get(keys=list(keys), partition_id=batch.payload.partition_id, select_fields=fields)

    rows = zip(data["responses"].unbind(0), data["loss_mask"].unbind(0), strict=True)
    found: dict[str, list[Any]] = {
        "turns": [_turns(tokenizer, ids.tolist(), mask.tolist()) for ids, mask in rows]
    }
    if INFO in names:
        found["place"] = [_place(getattr(info, "data", info)) for info in data[INFO]]
    return found


def _turns(tokenizer: Any, ids: Sequence[int], mask: Sequence[int]) -> list[Any] | None:
    if all(mask):
        return None
    return [[own, tokenizer.decode(part, skip_special_tokens=True)] for own, part in _parts(ids, mask)]


def _parts(ids: Sequence[int], mask: Sequence[int]) -> Iterator[tuple[bool, list[int]]]:
    for own, part in groupby(zip(ids, mask, strict=True), key=lambda one: bool(one[1])):
        yield own, [token for token, _ in part]


def _place(info: Any) -> dict[str, Any]:
    known = info if isinstance(info, Mapping) else {}
    return {name: known[name] for name in PLACE if known.get(name) is not None}
