# SPDX-License-Identifier: Apache-2.0
"""A gateway with one session, served on a free port."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from recipe.async_pipeline.gateway.registry import Sessions
from recipe.async_pipeline.gateway.sessions import Session, SessionLimits
from tests.fakes.agent_policy import LIMITS, FakePolicy


class Served(NamedTuple):
    """A gateway that serves."""

    url: str
    sessions: Sessions
    session: Session
    policy: FakePolicy


@asynccontextmanager
async def served(
    policy: FakePolicy | None = None, limits: SessionLimits = LIMITS, **options: Any
) -> AsyncIterator[Served]:
    # Optional packages; tests that use this skip without them.
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
