# SPDX-License-Identifier: Apache-2.0
"""Collect the responses of a validation from the sample store.

verl's buffer lists the keys of all partitions at each look, which includes every sample in training. This
one lists the partition of the validation only, and looks less often the longer it waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import transfer_queue as tq
from transfer_queue import KVBatchMeta

SOONEST_S, LATEST_S = 0.05, 2.0
"""Bounds of the seconds between two looks."""
WAITED_SHARE = 0.1
"""Seconds until the next look, as a share of the seconds waited so far."""
ENDED = ("finished", "failure")
"""verl's states of a prompt whose responses are complete."""


class ValidationBuffer:
    """In place of verl's replay buffer, which the pipeline needs for validation only."""

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
