# SPDX-License-Identifier: Apache-2.0
"""Rows of a data set, responses of a validation, and the balance of a batch: verl's ways, made cheaper.

A row that is no prompt, such as a broken picture, costs itself alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.utils import seqlen_balancing

from ....errors import BadDataError
from ...agent_loop.prompt_pictures import closed

logger = logging.getLogger(__name__)
SEARCHED = 1000
"""Rows of which one can be read, or the data set is useless."""
ROW, FLAW = "__row__", "__flaw__"
"""Columns for training: the number of the row, and why it is no prompt, or nothing."""


def keep_readable(dataset: Any, *, training: bool) -> None:
    """Have data loaders read a data set with `read_rows`, unless it reads whole batches itself."""
    if not hasattr(dataset, "__getitems__"):
        dataset.__getitems__ = partial(read_rows, dataset, training=training)


def read_rows(dataset: Any, numbers: Sequence[int], *, training: bool) -> list[dict[str, Any]]:
    """Return rows with closed pictures. Runs where the data loader runs.

    In training, each has ROW and FLAW; one that cannot be read has the columns of another row. Validation
    leaves such rows out, and decodes pictures to find them. Raises BadDataError if no row can be read.
    """
    found, flaws = dict[int, dict[str, Any]](), dict[int, str]()
    for number in numbers:
        _read(dataset, number, found, flaws, decode=not training)
    readable = next(iter(found.values()), None) or _first_readable(dataset, flaws, decode=not training)
    if training:
        return [
            {**found.get(number, readable), ROW: number, FLAW: flaws.get(number, "")} for number in numbers
        ]
    for flaw in flaws.values():
        logger.warning("validation leaves out %s", flaw)
    return [found[number] for number in numbers if number in found] or [readable]


def _read(
    dataset: Any, number: int, found: dict[int, dict[str, Any]], flaws: dict[int, str], *, decode: bool
) -> None:
    """Read a row into `found`, or note in `flaws` why that fails."""
    try:
        found[number] = closed(dataset[number], decode=decode)
    except Exception as error:  # noqa: BLE001 - a data set may raise anything
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        flaws[number] = f"row {number} of the data, counted from 0 after verl's filter: {why}"


def _first_readable(dataset: Any, flaws: dict[int, str], *, decode: bool) -> dict[str, Any]:
    """Return a row that has the columns of the others."""
    found = dict[int, dict[str, Any]]()
    for number in range(min(len(dataset), SEARCHED)):
        _read(dataset, number, found, {}, decode=decode)
        if found:
            return found[number]
    raise BadDataError(f"no row of the data can be made a prompt; {next(iter(flaws.values()))}; correct it")


SOONEST_S, LATEST_S = 0.05, 2.0
"""Bounds of the seconds between two looks."""
WAITED_SHARE = 0.1
"""Seconds until the next look, as a share of the seconds waited so far."""
ENDED = ("finished", "failure")
"""verl's states of a prompt whose responses are complete."""


class ValidationBuffer:
    """In place of verl's replay buffer, which the pipeline needs for validation only.

    verl's buffer lists the keys of all partitions at each look, which includes every sample in training. This
    one lists the partition of the validation only, and looks less often the longer it waits.
    """

    def __init__(
        self,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._now, self._sleep = now, sleep

    def sample(
        self, global_steps: int, partition_id: str, batch_size: int
    ) -> tuple[KVBatchMeta, dict[str, Any]]:
        """Return the responses of `batch_size` prompts once they are complete, and no metrics. Blocks.

        Removes the prompts from the store; the caller removes their responses.
        """
        began = self._now()
        while True:
            listed: Mapping[str, Any] = tq.kv_list(partition_id=partition_id).get(partition_id, {})
            ended = [key for key, tag in listed.items() if tag.get("is_prompt") and tag["status"] in ENDED]
            if len(ended) >= batch_size:
                break
            self._sleep(pause_s(self._now() - began))

        prompts = sorted(ended, key=lambda key: listed[key]["global_steps"])[:batch_size]
        tq.kv_clear(keys=prompts, partition_id=partition_id)
        chosen = set(prompts)
        found = {
            key: dict(tag)
            for key, tag in listed.items()
            if not tag.get("is_prompt") and key.split("_")[0] in chosen
        }
        return KVBatchMeta(partition_id=partition_id, keys=list(found), tags=list(found.values())), {}


def pause_s(waited_s: float) -> float:
    """Return the seconds until the next look."""
    return min(LATEST_S, max(SOONEST_S, WAITED_SHARE * waited_s))


def balanced_partitions(seqlen_list: Any, k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Return what verl's `get_seqlen_balanced_partitions` returns.

    verl sorts and adds the workloads of the responses as tensors of one element each. For 16,384 responses
    that takes seconds, and numbers give the same partitions.
    """
    lengths = seqlen_list.tolist() if isinstance(seqlen_list, torch.Tensor) else list(seqlen_list)
    if k_partitions == 1 and lengths:
        return [list(range(len(lengths)))]
    found: list[list[int]] = seqlen_balancing.get_seqlen_balanced_partitions(
        lengths, k_partitions=k_partitions, equal_size=equal_size
    )
    return found
