# SPDX-License-Identifier: Apache-2.0
"""Open many requests on one replica of another job through Ray, and measure its control calls meanwhile.

For `async-pipeline soak`: the requests come from outside, so no router bounds them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import ray
from ray.exceptions import RayError
from ray.util import list_named_actors

from ...errors import AsyncPipelineError
from ...verl_bridge.calls.direct_calls import DirectCaller

SERVER_NAME = re.compile(r"\w+_server_\d+_0(_\d+)?")
"""verl's name of the first server of a rollout replica; a restarted one has a further number."""
PAUSE_S = 0.05
"""Seconds between two control calls."""
TOKENS = 16
"""Tokens of a response, so that the requests are open at the same time."""


class FloodFailed(AsyncPipelineError, RuntimeError):
    """There is no replica, or a control call failed."""


def server_at(where: float) -> Any:
    """Return the handle of a replica's server, of any job of the cluster.

    `where`: position among them, 0 to 1. Raises FloodFailed if no server is found.
    """
    named = list_named_actors(all_namespaces=True)
    found = sorted(
        (actor["name"], actor["namespace"]) for actor in named if SERVER_NAME.fullmatch(actor["name"])
    )
    if not found:
        raise FloodFailed("no rollout server has a name in this Ray cluster")
    name, namespace = found[int(where * len(found))]
    return ray.get_actor(name, namespace)


class Checker:
    """An actor that calls `check` of a server at intervals and opens no requests, as the trainer does.

    It does not wait for a reply before the next call. Otherwise one slow call would hide all others.
    """

    def __init__(self, server: Any) -> None:
        self._server = DirectCaller(server)
        self._calls: list[asyncio.Task[float]] = []

    async def begin(self) -> None:
        """Start to call; return after the first reply. Raises what a check raises."""
        await self._call()
        self._calling = asyncio.create_task(self._call_at_intervals(), name="check a server")

    async def end(self) -> list[float]:
        """Return the latencies in seconds of all calls. Raises what a check raises."""
        self._calling.cancel()
        return await asyncio.gather(*self._calls)

    async def _call_at_intervals(self) -> None:
        while True:
            self._calls.append(asyncio.create_task(self._call(), name="check"))
            await asyncio.sleep(PAUSE_S)

    async def _call(self) -> float:
        started = time.monotonic()
        await self._server.call("check")
        return time.monotonic() - started


def flood(server: Any, requests: int, timeout_s: float) -> dict[str, Any]:
    """Open `requests` requests of `TOKENS` tokens at the same time; return when all have ended.

    Returns the number of lost requests, and number and latencies of the `check` calls meanwhile. Raises
    FloodFailed if a check fails or does not return, or the requests do not end within `timeout_s`.
    """
    checker = ray.remote(Checker).options(num_cpus=0).remote(server)
    try:
        _checked(checker.begin.remote(), timeout_s)
        started = time.monotonic()
        waiting = [
            server.generate.remote(
                request_id=uuid4().hex,
                prompt_ids=[1, 2, 3],
                sampling_params={"max_tokens": TOKENS, "ignore_eos": True},
            )
            for _ in range(requests)
        ]
        ended, waiting = ray.wait(waiting, num_returns=requests, timeout=timeout_s)
        if waiting:
            raise FloodFailed(f"{len(waiting)} of {requests} requests did not end within {timeout_s:g} s")
        seconds = time.monotonic() - started
        checks = sorted(_checked(checker.end.remote(), timeout_s))
    finally:
        ray.kill(checker)

    return {
        "requests": requests,
        "lost": sum(map(_failed, ended)),
        "seconds": round(seconds, 1),
        "checks": len(checks),
        "check_p50_s": round(checks[len(checks) // 2], 4),
        "check_p99_s": round(checks[int(0.99 * len(checks))], 4),
        "check_max_s": round(checks[-1], 4),
    }


def _checked(reply: Any, timeout_s: float) -> Any:
    try:
        return ray.get(reply, timeout=timeout_s)
    except RayError as error:
        raise FloodFailed(f"a check failed during the flood: {error}") from None


def _failed(ref: Any) -> bool:
    try:
        ray.get(ref)
    except RayError:
        return True
    return False


def main(arguments: Sequence[str]) -> int:
    """Flood a replica of the cluster at an address, and print the result as one line of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("requests", type=int)
    parser.add_argument("timeout_s", type=float)
    parser.add_argument("where", type=float)
    given = parser.parse_args(arguments)
    ray.init(address=given.address, log_to_driver=False, configure_logging=False)
    try:
        found = flood(server_at(given.where), given.requests, given.timeout_s)
    finally:
        ray.shutdown()
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
