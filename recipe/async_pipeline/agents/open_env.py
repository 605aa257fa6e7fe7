# SPDX-License-Identifier: Apache-2.0
"""An environment that a server of OpenEnv offers (https://github.com/meta-pytorch/OpenEnv, release 0.10).

One WebSocket is one session of the server, with its own environment. Messages are JSON objects with `type`
and `data`: `observation` or `error` is the answer to `reset` and `step`. Neither OpenEnv nor the environment
has to be installed here. `websockets` is imported for the connection; it is in the extra `agentic`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal
from urllib.parse import urlsplit, urlunsplit

from ..errors import ConfigError
from .environment import MESSAGE_BYTES, Step

SCHEMES: Mapping[str, str] = {"ws": "ws", "wss": "wss", "http": "ws", "https": "wss"}
"""The scheme of the connection by the scheme of the URL."""
NO_ACTION = "VALIDATION_ERROR"
"""OpenEnv's code for an action that does not fit its schema."""


class OpenEnvEnvironment:
    """Plays the environment at a URL: writes one field of an action and reads one of an observation."""

    def __init__(
        self,
        url: str,
        *,
        action: str,
        observation: str,
        invalid: Literal["end", "continue"] = "end",
        invalid_reward: float = 0.0,
    ) -> None:
        """`action` and `observation` name the fields. The server converts the text to the type of the field.

        A text that the server refuses as an action gets `invalid_reward`, and ends the episode or repeats the
        last observation. Raises ConfigError if the URL is none of a server.
        """
        if invalid not in ("end", "continue"):
            raise ConfigError(f"invalid must be end or continue, got {invalid!r}; end is the default")
        self._url = connection_url(url)
        self._action, self._observation = action, observation
        self._invalid, self._invalid_reward = invalid, invalid_reward
        self._socket: Any = None
        self._shown = ""

    async def reset(self, seed: int, **task: Any) -> str:
        """Begin an episode with the seed and the arguments in `task`, as far as the environment knows them.

        Raises ConnectionError if the server does not answer, RuntimeError if it reports an error.
        """
        # A server may close a session that waits for long.
        if self._socket is None or self._socket.close_code is not None:
            self._socket = await self._connect()
        found = await self._ask("reset", {"seed": seed, **task})
        return self._show(_result(found))

    async def step(self, text: str) -> Step:
        """Send an action. Raises as `reset`."""
        found = await self._ask("step", {self._action: text})
        if found["type"] == "error" and found["data"].get("code") == NO_ACTION:
            return Step(self._shown, self._invalid_reward, self._invalid == "end", invalid=True)
        result = _result(found)
        return Step(self._show(result), float(result.get("reward") or 0.0), bool(result.get("done")))

    async def close(self) -> None:
        """End the session of the server."""
        if self._socket is not None:
            await self._socket.close()

    async def _connect(self) -> Any:
        from websockets.asyncio.client import connect

        return await connect(self._url, max_size=MESSAGE_BYTES)

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        from websockets.exceptions import ConnectionClosed

        # A server without room for a session sends an error first, and closes the connection.
        with suppress(ConnectionClosed):
            await self._socket.send(json.dumps({"type": kind, "data": data}))
        found = json.loads(await self._socket.recv())
        if not isinstance(found, dict) or not isinstance(found.get("data"), dict):
            raise RuntimeError(f"{self._url} does not speak OpenEnv's protocol: {str(found)[:200]}")
        return {"type": "", **found}

    def _show(self, result: Mapping[str, Any]) -> str:
        fields = result.get("observation") or {}
        if self._observation not in fields:
            known = ", ".join(fields)
            raise RuntimeError(f"observations have no field {self._observation!r}; they have {known}")
        self._shown = str(fields[self._observation])
        return self._shown


def connection_url(url: str) -> str:
    """Return the URL of the server's WebSocket. Raises ConfigError if it is no URL of a server."""
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES or not parts.hostname:
        raise ConfigError(f"the URL of an environment must read ws://HOST:PORT, got {url!r}; correct it")
    path = parts.path.rstrip("/")
    if not path.endswith("/ws"):
        path += "/ws"
    return urlunsplit((SCHEMES[parts.scheme], parts.netloc, path, parts.query, ""))


def _result(found: Mapping[str, Any]) -> Mapping[str, Any]:
    data: Mapping[str, Any] = found["data"]
    if found["type"] != "observation":
        raise RuntimeError(f"{data.get('code', found['type'])}: {data.get('message', data)}")
    return data
