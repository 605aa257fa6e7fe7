# SPDX-License-Identifier: Apache-2.0
"""The conditions of prompts in a training worker, fetched once for all images of a prompt.

They are larger than all else that a step needs of an image. One response of each prompt has them in the
sample store, and the others have its key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import transfer_queue as tq
from cachetools import LRUCache

from ....diffusion.families import stacked
from ...rollout.diffusers.fields import CONDITION
from ...store.sample_columns import PARTITION

KEPT_BYTES = 1 << 28
"""Of conditions in a worker: a step reads them for old log-probs, and again to train. Later steps do not."""


class PromptConditions:
    """Reads the conditions of responses by the keys of the responses that hold them."""

    def __init__(self, names: Sequence[str]) -> None:
        """`names`: of the family's conditions."""
        self._names = names
        self._kept: LRUCache[str, Mapping[str, torch.Tensor]] = LRUCache(KEPT_BYTES, _num_bytes)

    def of(self, holders: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return the conditions of a batch, a row for each holder, on the CPU."""
        found = {key: self._kept[key] for key in {*holders} if key in self._kept}
        if missing := sorted({*holders} - found.keys()):
            columns = [CONDITION + name for name in self._names]
            data = tq.kv_batch_get(keys=missing, partition_id=PARTITION, select_fields=columns)
            for place, key in enumerate(missing):
                found[key] = {name: data[CONDITION + name][place] for name in self._names}
                if _num_bytes(found[key]) <= KEPT_BYTES:
                    self._kept[key] = found[key]
        return stacked([found[key] for key in holders])


def _num_bytes(conditions: Mapping[str, torch.Tensor]) -> int:
    return sum(one.nbytes for one in conditions.values())
