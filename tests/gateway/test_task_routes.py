# SPDX-License-Identifier: Apache-2.0
"""What an agent sends, and stalls, is bounded, and other agents are served meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("starlette")
from recipe.async_pipeline.errors import RequestRefused  # noqa: E402
from recipe.async_pipeline.gateway.task_routes import BUSY, MAX_REQUESTS, InFlight  # noqa: E402


async def whole_body(scope: Any, receive: Any, send: Any) -> None:
    """Read a body, as a handler does, and answer with its length or with the refusal."""
    size = 0
    try:
        while (message := await receive())["type"] == "http.request":
            size += len(message["body"])
            if not message["more_body"]:
                break
        await send(size)
    except RequestRefused as error:
        await send((error.status, str(error)))


class Client:
    """A request whose body is sent piece by piece."""

    def __init__(self, app: Any, key: str, path: str = "/v1/messages") -> None:
        self.pieces: asyncio.Queue[Any] = asyncio.Queue()
        self.answers: list[Any] = []
        headers = [(b"x-api-key", key.encode())]
        scope = {"type": "http", "path": path, "headers": headers}
        self.task = asyncio.ensure_future(app(scope, self.pieces.get, self._take))

    async def _take(self, answer: Any) -> None:
        self.answers.append(answer)

    async def send(self, size: int, *, last: bool = False) -> list[Any]:
        """Return what was answered when the piece has been read."""
        self.pieces.put_nowait({"type": "http.request", "body": b"x" * size, "more_body": not last})
        for _ in range(5):
            await asyncio.sleep(0)
        return self.answers


async def test_the_bodies_of_a_session_and_of_a_worker_are_bounded_until_their_answer() -> None:
    app = InFlight(whole_body, session_bytes=100, worker_bytes=250)
    first, second = Client(app, "a"), Client(app, "a")
    assert (await first.send(60), await second.send(40)) == ([], [])
    (status, why), *_ = await Client(app, "a").send(1)
    assert status == BUSY and "of the session without an answer exceed 100 bytes" in why
    others = [Client(app, key) for key in "bc"]
    assert [await one.send(size) for one, size in zip(others, (100, 50), strict=True)] == [[], []]
    (status, why), *_ = await Client(app, "d").send(1)
    assert status == BUSY and "the worker has too many bytes" in why
    assert await first.send(0, last=True) == [60]
    assert await Client(app, "a").send(1, last=True) == [1], "an answer makes room"
    for one in (second, *others):
        one.task.cancel()


async def test_the_requests_of_a_session_are_bounded() -> None:
    app = InFlight(whole_body)
    stalled = [Client(app, "a") for _ in range(MAX_REQUESTS)]
    await asyncio.sleep(0)
    (status, why), *_ = await Client(app, "a").send(1)
    assert status == BUSY and f"has {MAX_REQUESTS} requests without an answer" in why
    assert await Client(app, "b").send(1, last=True) == [1]
    stalled += [Client(app, "run", "/v1/tasks/claim") for _ in range(MAX_REQUESTS)]
    await asyncio.sleep(0)
    assert await Client(app, "run", "/v1/tasks/claim").send(1, last=True) == [1], "runners share a key"
    for one in stalled:
        one.task.cancel()
    await asyncio.wait([one.task for one in stalled])
    assert await Client(app, "a").send(1, last=True) == [1]
