# SPDX-License-Identifier: Apache-2.0
"""Episodes in an environment that a server offers by OpenEnv's protocol."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from recipe.async_pipeline.agents.env_hosts import HOSTS
from recipe.async_pipeline.agents.environment import EnvironmentSpec, Isolation, Step
from recipe.async_pipeline.agents.open_env import OpenEnvEnvironment, connection_url
from recipe.async_pipeline.errors import ConfigError, EnvironmentFailed

pytest.importorskip("websockets")

from websockets.exceptions import ConnectionClosed  # noqa: E402

from tests.fakes.open_env_server import counting_server  # noqa: E402

FIELDS = {"action": "number", "observation": "text"}


def play(episode: Callable[[OpenEnvEnvironment], Awaitable[Any]], **kwargs: Any) -> Any:
    async def main() -> Any:
        async with counting_server() as url:
            environment = OpenEnvEnvironment(url, **{**FIELDS, **kwargs})
            try:
                return await episode(environment)
            finally:
                await environment.close()

    return asyncio.run(main())


def test_one_connection_plays_many_episodes() -> None:
    async def episodes(environment: OpenEnvEnvironment) -> list[Any]:
        return [
            await environment.reset(3),
            await environment.step("4"),
            await environment.step("9"),
            await environment.step("5"),
            await environment.reset(6, skip=2),
        ]

    over = Step("at 5", 1.0, over=True)
    assert play(episodes) == ["at 3", Step("at 4", 1.0), Step("at 4", -1.0), over, "at 8"]


@pytest.mark.parametrize(("invalid", "over"), [("end", True), ("continue", False)])
def test_a_text_that_the_server_refuses_is_the_policys(invalid: str, over: bool) -> None:
    async def episode(environment: OpenEnvEnvironment) -> list[Step]:
        await environment.reset(1)
        return [await environment.step("two"), await environment.step("2")]

    refused, after = play(episode, invalid=invalid, invalid_reward=-0.5)
    assert refused == Step("at 1", -0.5, over, invalid=True)
    assert after == Step("at 2", 1.0), "it did not move"


@pytest.mark.parametrize(
    ("kwargs", "text", "why"),
    [
        ({}, "666", "EXECUTION_ERROR: no such luck"),
        ({"observation": "txt"}, "2", "observations have no field 'txt'; they have text"),
    ],
)
def test_errors_of_the_server_are_the_environments(kwargs: dict[str, str], text: str, why: str) -> None:
    async def episode(environment: OpenEnvEnvironment) -> None:
        await environment.reset(1)
        await environment.step(text)

    with pytest.raises(RuntimeError, match=why):
        play(episode, **kwargs)


def test_a_closed_connection_costs_one_episode() -> None:
    async def episodes(environment: OpenEnvEnvironment) -> str:
        await environment.reset(1)
        with pytest.raises(ConnectionClosed):
            await environment.step("0")
        return await environment.reset(2)

    assert play(episodes) == "at 2"


async def test_a_server_without_room_says_so() -> None:
    async with counting_server(capacity=1) as url:
        first, second = (OpenEnvEnvironment(url, action="number", observation="text") for _ in "ab")
        await first.reset(1)
        try:
            with pytest.raises(RuntimeError, match="CAPACITY_REACHED: no more sessions"):
                await second.reset(1)
        finally:
            await first.close()
            await second.close()


@pytest.mark.parametrize("isolation", list(HOSTS))
def test_it_plays_wherever_environments_run(isolation: Isolation) -> None:
    async def main() -> tuple[Any, Step, Any, bool]:
        async with counting_server() as url:
            host = HOSTS[isolation](EnvironmentSpec(name=url, kwargs=FIELDS))
            began, step, again = (
                await host.reset(3, {}),
                await host.step("4"),
                await host.reset(0, {"skip": 1}),
            )
            return began, step, again, await host.close()

    assert asyncio.run(main()) == ("at 3", Step("at 4", 1.0), "at 1", True)


def test_a_server_that_is_not_there_fails_the_episode() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"ws://127.0.0.1:{taken.getsockname()[1]}"
        host = HOSTS["inline"](EnvironmentSpec(name=url, kwargs=FIELDS))
        with pytest.raises(EnvironmentFailed, match="reset: ConnectionRefusedError"):
            asyncio.run(host.reset(1, {}))


@pytest.mark.parametrize(
    ("url", "connected"),
    [
        ("ws://127.0.0.1:8000", "ws://127.0.0.1:8000/ws"),
        ("http://host:80/", "ws://host:80/ws"),
        ("https://host/some/space", "wss://host/some/space/ws"),
        ("wss://host/ws", "wss://host/ws"),
    ],
)
def test_the_connection_follows_from_the_url(url: str, connected: str) -> None:
    assert connection_url(url) == connected


@pytest.mark.parametrize("url", ["ftp://host", "ws://", "://host", "ws://:80"])
def test_another_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="must read ws://HOST:PORT, got"):
        connection_url(url)
    with pytest.raises(ConfigError, match="invalid must be end or continue"):
        OpenEnvEnvironment("ws://host", **FIELDS, invalid="ignore")  # type: ignore[arg-type]
