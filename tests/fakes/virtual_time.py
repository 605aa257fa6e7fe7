# SPDX-License-Identifier: Apache-2.0
"""What tests await in virtual time."""

from __future__ import annotations

import asyncio
import sys

import pytest

from recipe.async_pipeline.core.waits.clock import LoopClock

counts_cancellations = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="Python 3.10 does not count cancellations"
)


def now() -> float:
    return LoopClock().now()


async def forever() -> None:
    await asyncio.get_running_loop().create_future()
