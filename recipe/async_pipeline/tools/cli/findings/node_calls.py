# SPDX-License-Identifier: Apache-2.0
"""Run a command on every node of a Ray cluster, even on a node that lacks this package."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray._private import services
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ....errors import ConfigError

CONNECT_S = 5.0
"""Seconds for an address to accept a connection."""


@dataclass(frozen=True, kw_only=True)
class NodeAnswer:
    """What a command printed on a node; `status` is None if it did not run, and `stderr` says why."""

    node: str
    """The address of the node."""
    python: str = ""
    status: int | None = None
    stdout: str = ""
    stderr: str = ""


def on_every_node(address: str, arguments: Sequence[str], timeout_s: float) -> list[NodeAnswer]:
    """Run the nodes' own Python with `arguments`, and return the answers in the order of the addresses.

    Waits for at most `timeout_s` seconds. Raises ConfigError if no cluster answers at `address`.
    """
    _require_cluster(address)
    ray.init(address=address, log_to_driver=False, configure_logging=False)
    try:
        nodes = {row["NodeID"]: row["NodeManagerAddress"] for row in ray.nodes() if row["Alive"]}
        run = ray.remote(_runner())
        pending = {
            run.options(
                num_cpus=0,
                max_retries=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            ).remote(list(arguments), timeout_s): ip
            for node, ip in nodes.items()
        }
        done, _ = ray.wait(list(pending), num_returns=len(pending), timeout=timeout_s)
        answered = set(done)
        answers = [
            _answer_of(ref, ip) if ref in answered else _silent(ip, timeout_s) for ref, ip in pending.items()
        ]
    finally:
        ray.shutdown()
    return sorted(answers, key=lambda answer: answer.node)


def _runner() -> Any:
    """Return the function that a node runs.

    It is local to this one so that Ray sends its code and not its name, which a node without this package
    could not import.
    """

    def run(arguments: list[str], timeout_s: float) -> tuple[str, int, str, str]:
        import subprocess
        import sys

        done = subprocess.run(
            [sys.executable, *arguments], capture_output=True, text=True, timeout=timeout_s, check=False
        )
        return sys.executable, done.returncode, done.stdout, done.stderr

    return run


def _answer_of(ref: Any, ip: str) -> NodeAnswer:
    try:
        python, status, stdout, stderr = ray.get(ref)
    except ray.exceptions.RayError as error:
        return NodeAnswer(node=ip, stderr=str(error).strip().splitlines()[-1])
    return NodeAnswer(node=ip, python=python, status=status, stdout=stdout, stderr=stderr)


def _silent(ip: str, timeout_s: float) -> NodeAnswer:
    return NodeAnswer(node=ip, stderr=f"no answer within {timeout_s:g} s")


def _require_cluster(address: str) -> None:
    """Raise ConfigError unless a cluster answers. Ray itself would wait for a minute."""
    if address == "auto":
        if not services.find_gcs_addresses():
            raise ConfigError(
                "--cluster auto requires a Ray cluster that runs on this machine, found none; start one with "
                "`ray start --head`, or name its address: --cluster HOST:6379"
            )
        return

    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--cluster must be auto or HOST:PORT of a running Ray head, got {address} ({error}); "
            "`ray status` on the head prints the address"
        ) from None
