# SPDX-License-Identifier: Apache-2.0
"""Open many requests on one replica of another job through Ray, and measure its control calls meanwhile.

For `async-pipeline soak`: the requests come from outside, so no router bounds them.
"""

from __future__ import annotations

import argparse
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

SERVER_NAME = re.compile(r"\w+_server_\d+_0(_\d+)?")
"""verl's name of the first server of a rollout replica; a restarted one has a further number."""
PAUSE_S = 0.05
"""Seconds between two control calls."""


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


def flood(server: Any, requests: int, timeout_s: float) -> dict[str, Any]:
    """Open `requests` requests of one token at the same time; return when all have ended.

    Returns the number of lost requests, and number and latencies of the `check` calls until then. Raises
    FloodFailed if a check fails or does not return, or the requests do not end within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    waiting = [
        server.generate.remote(
            request_id=uuid4().hex, prompt_ids=[1, 2, 3], sampling_params={"max_tokens": 1}
        )
        for _ in range(requests)
    ]
    ended: list[Any] = []
    checks: list[float] = []
    while waiting:
        started = time.monotonic()
        if started > deadline:
            raise FloodFailed(f"{len(waiting)} of {requests} requests did not end within {timeout_s:g} s")
        try:
            ray.get(server.check.remote(), timeout=timeout_s)
        except RayError as error:
            raise FloodFailed(f"a check failed during the flood: {error}") from None
        checks.append(time.monotonic() - started)
        done, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=PAUSE_S)
        ended += done

    checks.sort()
    return {
        "requests": requests,
        "lost": sum(map(_failed, ended)),
        "checks": len(checks),
        "check_p50_s": round(checks[len(checks) // 2], 4),
        "check_p99_s": round(checks[int(0.99 * len(checks))], 4),
    }


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
