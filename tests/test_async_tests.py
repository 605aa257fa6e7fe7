# SPDX-License-Identifier: Apache-2.0
"""Async tests run in an event loop, in virtual time if they are marked so, and can fail."""

from __future__ import annotations

import asyncio

import pytest

from tests.conftest import in_a_loop


async def fails() -> None:
    await asyncio.sleep(0)
    raise ValueError("the test")


@pytest.mark.parametrize("virtual_time", [False, True])
def test_an_async_test_can_fail(virtual_time: bool) -> None:
    with pytest.raises(ValueError, match="the test"):
        in_a_loop(fails, virtual_time=virtual_time)()


@pytest.mark.virtual_time
async def test_an_hour_of_virtual_time_takes_no_time() -> None:
    await asyncio.sleep(3600)
    assert asyncio.get_running_loop().time() == 3600


async def test_an_unmarked_test_has_the_clock_of_the_machine() -> None:
    before = asyncio.get_running_loop().time()
    await asyncio.sleep(0)
    assert asyncio.get_running_loop().time() - before < 60
