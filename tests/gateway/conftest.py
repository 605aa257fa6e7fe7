# SPDX-License-Identifier: Apache-2.0
"""A gateway with one session, served on a free port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest

from recipe.async_pipeline.gateway.registry import Sessions
from recipe.async_pipeline.gateway.sessions import Session, SessionLimits
from tests.fakes.agent_policy import LIMITS, FakePolicy


class Served(NamedTuple):
    """A gateway that serves."""

    url: str
    sessions: Sessions
    session: Session
    policy: FakePolicy


Serve = Callable[..., Any]


@asynccontextmanager
async def served(
    policy: FakePolicy | None = None, limits: SessionLimits = LIMITS, **options: Any
) -> AsyncIterator[Served]:
    from recipe.async_pipeline.gateway.app import Gateway
    from recipe.async_pipeline.gateway.server import GatewayServer

    sessions, policy = Sessions(), policy or FakePolicy()
    session = Session(policy, limits)
    sessions.add(session)
    server = GatewayServer(Gateway(sessions, **options).app)
    await server.start()
    try:
        yield Served(server.url, sessions, session, policy)
    finally:
        await session.close()
        await server.stop()


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
