# SPDX-License-Identifier: Apache-2.0
"""`async-pipeline bench gateway`: measure what a request of an agent costs the process that serves it.

    this process: gateway, sessions, an engine that sleeps     another process: all agents, raw HTTP

The engine and the tokenizer cost next to nothing (one token a byte), so what is measured is HTTP, JSON, the
comparison of histories and the bookkeeping of tokens. Every row is compared with what the engine got and
wrote.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...console import echo
from ...core.groups.items import spans_of
from ...errors import ConfigError
from ...gateway.chains import Completion
from ...gateway.conversation import Message, Said, SentPicture
from ...gateway.registry import Sessions
from ...gateway.sessions import Session, SessionLimits
from ...gateway.turns import Form
from .measuring.loop_lag import LagMeter
from .measuring.machine import machine
from .results.outputs import check_outputs

CLIENTS = "recipe.async_pipeline.lab.bench.gateway_clients"
ANSWER = b"an answer of the policy"
END = 257
ENGINE_S = 0.05
TIMEOUT_S = 600.0
TARGET_MS, TARGET_STALL_S = 3.0, 1.0
"""CPU milliseconds of a request, and the longest time that the event loop may be blocked."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `async-pipeline bench gateway`."""
    parser.add_argument(
        "--sessions", type=int, default=512, metavar="N", help="agents at once (default: %(default)s)"
    )
    parser.add_argument(
        "--turns", type=int, default=5, metavar="N", help="turns of each agent (default: %(default)s)"
    )
    parser.add_argument(
        "--bytes", type=int, default=1000, metavar="N", help="of each observation (default: %(default)s)"
    )
    parser.add_argument(
        "--json", type=Path, default=argparse.SUPPRESS, metavar="FILE", help="write all results to FILE"
    )


def run(args: argparse.Namespace) -> int:
    """Measure. Returns 1 if a row is wrong or a target is missed. Raises ConfigError for a wrong option."""
    for name in ("sessions", "turns", "bytes"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} must be >= 1, got {getattr(args, name)}")
    out: Path | None = getattr(args, "json", None)
    check_outputs(out, None, None)
    found = asyncio.run(measure(args.sessions, args.turns, args.bytes))
    echo(
        f"{args.sessions} sessions x {args.turns} turns of {args.bytes} bytes: "
        f"{found['cpu_ms_per_request']:.2f} ms CPU a request, "
        f"loop blocked for at most {found['stall_s']:.3f} s, {found['memory_mib']:.0f} MiB more, "
        f"{found['wrong']} wrong rows"
    )
    if out is not None:
        out.write_text(json.dumps({"machine": machine(), **found}, indent=2) + "\n", encoding="utf-8")
    missed = found["cpu_ms_per_request"] > TARGET_MS or found["stall_s"] > TARGET_STALL_S or found["wrong"]
    return 1 if missed else 0


class BytePolicy:
    """One token a byte; the engine waits and writes the same answer each time."""

    vocabulary = 256

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []

    async def begin(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        return [*b"".join(message["content"].encode() for message in messages)]

    async def encode(self, text: str) -> list[int]:
        return [*text.encode()]

    async def append(
        self,
        previous: Sequence[Message],
        new: Sequence[Message],
        token_ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]],
    ) -> tuple[list[int], int]:
        return [*token_ids, *await self.begin(new, tools)], len(token_ids)

    async def generate(
        self,
        request_id: str,
        token_ids: Sequence[int],
        max_tokens: int,
        stop: Sequence[str],
        form: Form | None = None,
        pictures: Sequence[SentPicture] = (),
    ) -> Completion:
        self.prompts.append(list(token_ids))
        await asyncio.sleep(ENGINE_S)
        return Completion([*ANSWER, END], [-0.5] * (len(ANSWER) + 1), spans_of([(len(self.prompts), 0)]))

    async def read(
        self, token_ids: Sequence[int], tools: Sequence[Mapping[str, Any]], stop: Sequence[str]
    ) -> Said:
        return Said(bytes(token_ids[:-1]).decode())


def wrong_rows(session: Session, policy: BytePolicy, turns: int) -> int:
    """Return how many rows differ from the one that the session should have."""
    rows = session.rows()
    if len(rows) != 1 or rows[0].answers != turns:
        return max(1, len(rows))
    (row,) = rows
    whole, start = row.prompt_ids + row.response_ids, len(row.prompt_ids)
    right = sum(row.mask) == turns * (len(ANSWER) + 1) and all(
        whole[: start + at] == policy.prompts[number - 1]
        and bytes(whole[start + at :][: len(ANSWER)]) == ANSWER
        for number, at in row.spans
    )
    return 0 if right else 1


async def measure(sessions: int, turns: int, size: int) -> dict[str, float]:
    """Serve all agents at once. Returns CPU milliseconds of a request, stall in seconds, MiB and wrong rows.

    Raises RuntimeError if the agents fail.
    """
    from ...gateway.app import Gateway
    from ...gateway.server import GatewayServer

    limits = SessionLimits(
        prompt_tokens=size, response_tokens=(turns + 1) * (size + len(ANSWER) + 9), max_turns=turns
    )
    registry, policies = Sessions(), [BytePolicy() for _ in range(sessions)]
    played = [Session(policy, limits) for policy in policies]
    for session in played:
        registry.add(session)
    server, meter = GatewayServer(Gateway(registry).app), LagMeter()
    await server.start()
    clients = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", CLIENTS), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    metering = asyncio.create_task(meter.run())
    memory, used, started = _memory_mib(), time.process_time(), time.perf_counter()
    spec = {
        "port": server.port,
        "keys": [session.keys.model for session in played],
        "turns": turns,
        "size": size,
    }
    told = await asyncio.wait_for(clients.communicate(json.dumps(spec).encode()), TIMEOUT_S)
    used, seconds = time.process_time() - used, time.perf_counter() - started
    metering.cancel()
    errors = json.loads(told[0] or b"{}").get("errors", ["the agents ended"])
    if errors:
        raise RuntimeError(f"{len(errors)} agents failed, the first with: {errors[0]}")
    wrong = sum(wrong_rows(session, policy, turns) for session, policy in zip(played, policies, strict=True))
    for session in played:
        await session.close()
    await server.stop()
    return {
        "sessions": sessions,
        "turns": turns,
        "bytes": size,
        "cpu_ms_per_request": round(1e3 * used / (sessions * turns), 4),
        "stall_s": round(meter.summary()["own_max"], 4),
        "memory_mib": round(_memory_mib() - memory, 1),
        "seconds": round(seconds, 3),
        "wrong": wrong,
    }


def _memory_mib() -> float:
    """Return the largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
