# SPDX-License-Identifier: Apache-2.0
"""A server that speaks OpenEnv's protocol: count up by writing the next number; 0 closes the connection."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from websockets.asyncio.server import ServerConnection, serve


@asynccontextmanager
async def counting_server(capacity: int = 8) -> AsyncIterator[str]:
    """Yield the URL. Each connection counts from its seed; `capacity`: connections at the same time."""
    connections: set[ServerConnection] = set()

    async def session(connection: ServerConnection) -> None:
        if len(connections) >= capacity:
            await connection.send(json.dumps(error("CAPACITY_REACHED", "no more sessions")))
            return
        connections.add(connection)
        count = 0
        try:
            async for message in connection:
                asked = json.loads(message)
                if asked["type"] == "step" and asked["data"]["number"] == "0":
                    return
                if asked["type"] == "reset":
                    count = asked["data"]["seed"] + asked["data"].get("skip", 0)
                    answer = observation(count, None)
                elif not asked["data"]["number"].isdecimal():
                    answer = error("VALIDATION_ERROR", "Invalid message")
                elif int(asked["data"]["number"]) == 666:
                    answer = error("EXECUTION_ERROR", "no such luck")
                else:
                    right = int(asked["data"]["number"]) == count + 1
                    count += right
                    answer = observation(count, 1.0 if right else -1)
                await connection.send(json.dumps(answer))
        finally:
            connections.remove(connection)

    async with serve(session, "127.0.0.1", 0) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        yield f"ws://127.0.0.1:{port}"


def observation(count: int, reward: float | None) -> dict[str, Any]:
    """Return an answer. The episode is over at a multiple of five."""
    data = {"observation": {"text": f"at {count}"}, "reward": reward, "done": count % 5 == 0}
    return {"type": "observation", "data": data}


def error(code: str, message: str) -> dict[str, Any]:
    """Return an answer that reports an error."""
    return {"type": "error", "data": {"code": code, "message": message}}
