# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests that talk to a gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.fakes.served_gateway import served

Serve = Callable[..., Any]


@pytest.fixture
def serve() -> Serve:
    """Return a context that serves a policy's session."""
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    return served


@pytest.fixture
def play() -> Callable[[Callable[[], Awaitable[None]]], None]:
    """Return a function that runs a test with a time limit."""

    def run(test: Callable[[], Awaitable[None]]) -> None:
        asyncio.run(asyncio.wait_for(test(), 60))

    return run
