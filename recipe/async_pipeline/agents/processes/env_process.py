# SPDX-License-Identifier: Apache-2.0
"""A process that plays one environment after another's requests, and ends with everything it started.

    pool ──socket──► player: reset, step, close; JSON lines
      └──lifeline──► guard: kills the player's process group when the player ends, or the pool's process does

    python -m recipe.async_pipeline.agents.processes.env_process SOCKET LIFELINE

The guard is the process that the pool starts; it forks the player before anything else is imported. Its end
of the lifeline, a pipe, becomes readable when the last process that holds the other end is gone, also after
`kill -9`. The kernel kills the player if the guard is killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

from ...errors import EnvironmentFailed
from ...processes import end_with_parent, gain_no_rights
from ..environment import MESSAGE_BYTES, EnvironmentSpec, Player, to_json
from .command_process import adopt_orphans, end_children, guard, reap_orphans


def main(arguments: list[str]) -> int:
    """Run as guard, and in a child as player. Returns the exit status of the guard."""
    control, lifeline = map(int, arguments)
    adopt_orphans()
    player = os.fork()
    if player == 0:
        end_with_parent()
        os.setpgid(0, 0)
        os.close(lifeline)
        gain_no_rights()
        asyncio.run(serve(socket.socket(fileno=control)))
        return 0

    with suppress(PermissionError):  # the child was faster, and its program has begun
        os.setpgid(player, player)
    os.close(control)
    signal.signal(signal.SIGCHLD, lambda *_: reap_orphans(player))
    try:
        guard(player, lifeline)
    finally:
        end_children()
    return 0


async def serve(control: socket.socket) -> None:
    """Answer requests until the socket is closed. The first one is the spec of the environment."""
    control.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=control, limit=MESSAGE_BYTES)
    player: Player | None = None
    try:
        while line := await reader.readline():
            request = json.loads(line)
            if player is None:
                player = Player(EnvironmentSpec(**request))
                continue
            writer.write(json.dumps(await answer(player, request)).encode() + b"\n")
            await writer.drain()
    finally:
        writer.close()


async def answer(player: Player, request: dict[str, Any]) -> dict[str, Any]:
    """Return the result of one call, or its error."""
    try:
        if request["call"] == "reset":
            return {"result": to_json(await player.reset(request["seed"], request["task"]))}
        observation, *rest = await player.step(request["text"])
        return {"result": [to_json(observation), *rest]}
    except EnvironmentFailed as error:
        return {"error": str(error)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
