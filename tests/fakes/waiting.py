# SPDX-License-Identifier: Apache-2.0
"""Wait for a condition, with a deadline that only a broken program reaches."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests import HANG_S


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.01)
