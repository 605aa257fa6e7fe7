# SPDX-License-Identifier: Apache-2.0
"""The messages of a player's process; `test_env_hosts` tests its ends."""

from __future__ import annotations

import asyncio
import json
import socket

from recipe.async_pipeline.agents.processes.env_process import serve
from tests import HANG_S


async def test_each_request_has_one_answer_until_the_socket_is_closed() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    serving = asyncio.create_task(serve(theirs))
    reader, writer = await asyncio.open_connection(sock=ours)
    answers = []
    for number, message in enumerate(
        (
            {"name": "tests.fakes.environments:Counting", "kwargs": {"start": 2}},
            {"call": "reset", "seed": 5, "task": {"hint": "h"}},
            {"call": "step", "text": "a"},
            {"call": "step", "text": "nan"},
            {"call": "step", "text": "stop"},
        )
    ):
        writer.write(json.dumps(message).encode() + b"\n")
        if number:
            answers.append(json.loads(await reader.readline()))
    writer.close()
    await writer.wait_closed()
    await asyncio.wait_for(serving, HANG_S)
    assert answers == [
        {"result": "seed 5 episode 1 h"},
        {"result": ["a 3", 0.5, False, False]},
        {"error": "the reward of a step must be a finite number, got nan"},
        {"result": ["stop 5", 0.5, True, False]},
    ]
