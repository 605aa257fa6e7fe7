# SPDX-License-Identifier: Apache-2.0
"""Wait for a condition, with a deadline that only a broken program reaches."""

from __future__ import annotations

import time
from collections.abc import Callable

DEADLINE_S = 60.0


def until(condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.01)
