# SPDX-License-Identifier: Apache-2.0
"""What tells the prompts of a data set apart, for seeds that follow from it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np


def place_of(row: Mapping[str, Any]) -> int | str:
    """Return the row's index in the data, or a digest of its prompt and task if the data have none.

    verl gives index 0 to all rows without `extra_info.index`, whose seeds would be the same.
    """
    info = row.get("extra_info") or {}
    index = row.get("index")
    if index is not None and (index != 0 or "index" in info):
        return int(index) if isinstance(index, int | np.integer) else str(index)
    content = [list(row.get("raw_prompt", ())), info.get("task")]
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
