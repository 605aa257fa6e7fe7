# SPDX-License-Identifier: Apache-2.0
"""The faults, and how recovery from each is detected.

A fault is a function that injects it and, if it is temporary, waits until it has passed.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import psutil

from ...processes import send_signal
from ...weight_sync.memory.segment_names import SHM_DIR, open_own
from ..bench.inputs.workload import CONFIGS
from ..job import with_cpu_settings
from .job import ENGINES, SERVERS, START_S, TEACHERS, RecordFields, SoakFailed, SoakJob, served
from .misbehaviour import misbehave
from .small_disk import empty, fill
from .standins import trackio
from .surroundings import close_output, close_terminal, launch_again, preempt, step_clock

STALL_FACTOR, STALL_S, SLICE_S = 50, 5.0, 0.01
"""A stalled engine runs for one slice of SLICE_S in STALL_FACTOR, for STALL_S seconds."""
CORRUPT_S, STOPPED_S = 1.5, 5.0
"""Seconds around a corruption, and at most between stopping the servers and the next version."""
NEAR = 1 << 16
"""Bytes at the beginning of a bucket among which one is corrupted."""
NO_CHECKPOINT, FULL_S = "has no checkpoint, because the disk is full", 120.0
"""Part of the line about a checkpoint that failed on a full disk, and seconds until one must have failed."""
BURST, PAUSE_S, BURST_LIMIT_S = 2048, 2.0, 120.0
"""Requests of a burst, seconds for which the engine is stopped meanwhile, deadline of a request."""
FLOOD, FLOOD_LIMIT_S, FLOOD_START_S, CONTROL_S = 4096, 120.0, 60.0, 1.0
"""Requests of a flood, their deadline, seconds for its process to start, and the largest latency of 99 in 100
checks."""
FLOODING = "recipe.async_pipeline.lab.soak.flood"
RAYLET, RAY_ADDRESS = "raylet", re.compile(r"--gcs-address=(\S+)")
NEXT_VERSION_S = 60.0
"""Seconds until the next weight version must have been gathered."""


SoakTask = Literal["addition", "lake", "calculator", "lake_agent", "distill"]
"""What the run of a soak learns: sums, with a reward function; FrozenLake, with environments; sums, with a
tool; FrozenLake, played by a program over HTTP; sums, from a teacher.
"""


class Fault(NamedTuple):
    """One kind of fault."""

    text: str
    inflict: Callable[[SoakJob], None]
    over: Literal["a replica is back", "versions are served again", "the run is back"]
    """The evidence that the run has recovered."""
    task: SoakTask | None = None
    """The only task that has what fails; None for any."""


def kill_engine(job: SoakJob) -> None:
    """Kill an engine process with SIGKILL."""
    send_signal(job.pick(*ENGINES).pid, signal.SIGKILL)


def kill_replica(job: SoakJob) -> None:
    """Kill a replica's server with SIGKILL."""
    send_signal(job.pick(*SERVERS).pid, signal.SIGKILL)


def kill_receiver(job: SoakJob) -> None:
    """Kill an engine process right after a version was gathered: before, during or after its load."""
    engine = job.pick(*ENGINES)
    job.wait_for("a gathered version", _has("GATHERED"), NEXT_VERSION_S)
    send_signal(engine.pid, signal.SIGKILL)


def kill_teacher(job: SoakJob) -> None:
    """Kill the server of a teacher with SIGKILL."""
    send_signal(job.pick(*TEACHERS).pid, signal.SIGKILL)


def stall_replica(job: SoakJob) -> None:
    """Slow an engine process down, of a replica or of a teacher, with SIGSTOP and SIGCONT."""
    engine, until = job.pick(*ENGINES), time.monotonic() + STALL_S
    while time.monotonic() < until:
        send_signal(engine.pid, signal.SIGSTOP)
        time.sleep(SLICE_S * (STALL_FACTOR - 1))
        send_signal(engine.pid, signal.SIGCONT)
        time.sleep(SLICE_S)


def corrupt_bucket(job: SoakJob) -> None:
    """Flip one bit of each bucket between checksum and load, and restore it afterwards."""
    deadline = time.monotonic() + NEXT_VERSION_S
    while not _flip_while_stopped(job):
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"no version was gathered within {NEXT_VERSION_S:g} s while the replicas were stopped"
            )
        time.sleep(CORRUPT_S)


def _flip_while_stopped(job: SoakJob) -> bool:
    """Stop the servers, flip bits once a version is gathered, and continue them; return whether it worked.

    It fails, and flips nothing, if the next version needs a response from a stopped server.
    """
    servers = [found.pid for found in job.processes(*SERVERS)]
    for pid in servers:
        send_signal(pid, signal.SIGSTOP)
    try:
        job.wait_for("a gathered version", _has("GATHERED"), STOPPED_S)
        time.sleep(CORRUPT_S)
        flipped = [flip for name in _buckets(job) if (flip := _flip(name, job.random.random())) is not None]
    except TimeoutError:
        return False
    finally:
        for pid in servers:
            send_signal(pid, signal.SIGCONT)

    time.sleep(CORRUPT_S)
    for name, offset, byte in flipped:
        _heal(name, offset, byte)
    return True


def _buckets(job: SoakJob) -> list[str]:
    """Return the names of the large shared-memory segments of the run's processes."""
    pids = {str(found.pid) for found in job.processes()}
    segments = [path for path in SHM_DIR.glob("async_pipeline-*") if path.name.split("-")[2] in pids]
    largest = max((path.stat().st_size for path in segments), default=0)
    return [path.name for path in segments if path.stat().st_size * 2 > largest]


def _flip(name: str, where: float) -> tuple[str, int, int] | None:
    """Flip one bit near the beginning of a segment, where tensors are.

    `where`: position among the non-zero bytes, 0 to 1. Returns the name, the offset and the original byte, or
    None if all bytes there are zero.
    """
    fd = open_own(name)
    try:
        text = os.pread(fd, NEAR, 0)
        used = [i for i, byte in enumerate(text) if byte]
        if not used:
            return None

        offset = used[int(where * len(used))]
        os.pwrite(fd, bytes([text[offset] ^ 1]), offset)
        return name, offset, text[offset]
    finally:
        os.close(fd)


def _heal(name: str, offset: int, byte: int) -> None:
    """Restore a flipped byte, unless it has been overwritten since."""
    if not (SHM_DIR / name).exists():
        return
    fd = open_own(name)
    try:
        if os.pread(fd, 1, offset) == bytes([byte ^ 1]):
            os.pwrite(fd, bytes([byte]), offset)
    finally:
        os.close(fd)


def kill_run(job: SoakJob) -> None:
    """Kill every process of the run, then start it again."""
    job.kill()
    job.start()


def full_disk(job: SoakJob) -> None:
    """Fill the disk until a checkpoint fails."""
    disk, since = job.folder / "disk", job.log.stat().st_size
    fill(disk)
    try:
        job.wait_for_line(NO_CHECKPOINT, FULL_S, since)
    finally:
        empty(disk)


def burst(job: SoakJob) -> None:
    """Send many requests from outside at the same time while the engine is stopped."""
    server = job.pick(*SERVERS)
    engines = [
        child.pid
        for child in psutil.Process(server.pid).children(recursive=True)
        if any(engine in " ".join(child.cmdline()) for engine in ENGINES)
    ]
    asyncio.run(_burst(_port_of(server.pid), engines, openai="VLLM" in server.command))


async def _burst(port: int, engines: Sequence[int], *, openai: bool) -> None:
    import aiohttp  # noqa: PLC0415  only this fault needs it

    base = f"http://127.0.0.1:{port}"
    timeout = aiohttp.ClientTimeout(total=BURST_LIMIT_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        body: dict[str, Any] = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 1}}
        path = "generate"
        if openai:
            async with session.get(f"{base}/v1/models") as response:
                model = (await response.json())["data"][0]["id"]
            body, path = {"model": model, "prompt": [1, 2, 3], "max_tokens": 1}, "v1/completions"

        async def request() -> int:
            async with session.post(f"{base}/{path}", json=body) as response:
                await response.read()
                return response.status

        for pid in engines:
            send_signal(pid, signal.SIGSTOP)
        try:
            requests = [asyncio.create_task(request()) for _ in range(BURST)]
            await asyncio.sleep(PAUSE_S)
        finally:
            for pid in engines:
                send_signal(pid, signal.SIGCONT)
        results = await asyncio.gather(*requests, return_exceptions=True)

    lost = [one for one in results if one != 200]
    if lost:
        raise SoakFailed(f"{len(lost)} of {BURST} requests got no response, e.g. {lost[0]!r}")


def _port_of(pid: int) -> int:
    """Return the local HTTP port of a process. Raises SoakFailed if it has none."""
    for connection in psutil.Process(pid).net_connections(kind="tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.ip in ("127.0.0.1", "::1"):
            return int(connection.laddr.port)
    raise SoakFailed(f"process {pid} does not listen on this machine")


def flood(job: SoakJob) -> None:
    """Open many requests on one replica through Ray, as agent loop workers do, but without their bound.

    Raises SoakFailed if a request is lost, a check is slow, or a replica is fenced.
    """
    since = job.now()
    command = [sys.executable, "-m", FLOODING, _ray_address_of(job)]
    limits = [str(FLOOD), f"{FLOOD_LIMIT_S:g}", f"{job.random.random():.3f}"]
    try:
        ended = subprocess.run(
            with_cpu_settings([*command, *limits]),
            cwd=CONFIGS.parent,
            # Ray starts a cluster with a token, but presents it only in this mode.
            env={**os.environ, **job.environment, "RAY_AUTH_MODE": "token"},
            capture_output=True,
            text=True,
            timeout=FLOOD_START_S + 2 * FLOOD_LIMIT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise SoakFailed(f"the flood did not end within {error.timeout:g} s") from None
    with job.log.open("a") as log:
        log.write(ended.stderr + ended.stdout)
    if ended.returncode:
        *_, last = ["no message", *ended.stderr.splitlines()]
        raise SoakFailed(f"the flood failed: {last}; see {job.log}")

    found = json.loads(ended.stdout.splitlines()[-1])
    if found["lost"] or found["check_p99_s"] > CONTROL_S:
        raise SoakFailed(
            f"flood: no request may be lost and the 99th percentile of the checks must be at most "
            f"{CONTROL_S:g} s, got {found['lost']} of {FLOOD} and {found['check_p99_s']:g} s; see {job.log}"
        )
    job.read()
    fenced = [record["replica"] for record in job.records[since:] if record["event"] == "FENCED"]
    if fenced:
        raise SoakFailed(f"{fenced[0]} was fenced during a flood, although it was healthy; see {job.run_dir}")


def _ray_address_of(job: SoakJob) -> str:
    """Return the address of the run's Ray cluster. Raises SoakFailed if its raylet is not running."""
    found = next(filter(None, (RAY_ADDRESS.search(one.command) for one in job.processes(RAYLET))), None)
    if found is None:
        raise SoakFailed("no raylet of the run has a --gcs-address in its command line")
    return found[1]


def _has(event: str) -> Callable[[Sequence[RecordFields]], bool]:
    return lambda records: any(record["event"] == event for record in records)


def _mood(mood: str, task: SoakTask | None, text: str, versions: int = 0) -> Fault:
    return Fault(text, misbehave(mood, versions), "versions are served again", task)


FAULTS: Mapping[str, Fault] = {
    "kill_engine": Fault("SIGKILL of an engine process", kill_engine, "a replica is back"),
    "kill_replica": Fault("SIGKILL of a replica's server", kill_replica, "a replica is back"),
    "kill_teacher": Fault("SIGKILL of a teacher's server", kill_teacher, "a replica is back", "distill"),
    "kill_receiver": Fault(
        "SIGKILL of an engine process while it loads weights", kill_receiver, "a replica is back"
    ),
    "stall_replica": Fault(
        f"an engine process {STALL_FACTOR} times slower for {STALL_S:g} s",
        stall_replica,
        "versions are served again",
    ),
    "corrupt_bucket": Fault(
        "a flipped bit in weights in transit", corrupt_bucket, "versions are served again"
    ),
    "slow_reward": _mood("slow", "addition", "one response in four takes a second to score"),
    "raising_reward": _mood("raise", "addition", "the reward function raises for one response in four"),
    "hanging_reward": _mood("hang", "addition", "the reward function hangs for one response in four"),
    "env_hung": _mood("hang", "lake", "one environment in four hangs in a step"),
    "env_died": _mood("die", "lake", "the process of one environment in four dies"),
    "env_raises": _mood("raise", "lake", "one environment in four raises in a step"),
    "tool_raises": _mood("raise", "calculator", "one tool call in four raises"),
    "tool_hung": _mood("hang", "calculator", "one tool call in four hangs"),
    "agent_killed": _mood("die", "lake_agent", "SIGKILL of one agent in four"),
    "agent_hung": _mood("hang", "lake_agent", "one agent in four hangs"),
    "client_retries": _mood("retry", "lake_agent", "one agent in four sends requests again"),
    "tracker_refuses": _mood(trackio.REFUSES, None, "a tracker answers 503"),
    "tracker_hangs": _mood(trackio.HANGS, None, "a tracker does not answer for two versions", versions=2),
    "full_disk": Fault(
        "no space is left for the run's files and a checkpoint (needs root, to mount a disk)",
        full_disk,
        "versions are served again",
    ),
    "burst": Fault(
        f"{BURST} requests from outside while an engine is stopped", burst, "versions are served again"
    ),
    "flood": Fault(
        f"{FLOOD} requests at once through Ray to one replica", flood, "versions are served again"
    ),
    "kill_run": Fault(
        "SIGKILL of every process of the run, then the same command again", kill_run, "the run is back"
    ),
    "closed_output": Fault(
        "the reader of the output ends; later Ctrl-C, and the same command again",
        close_output,
        "the run is back",
    ),
    "closed_terminal": Fault("SIGHUP, then the same command again", close_terminal, "the run is back"),
    "preemption": Fault(
        "SIGTERM with time for a checkpoint, then the same command again", preempt, "the run is back"
    ),
    "second_launch": Fault("the same command a second time", launch_again, "versions are served again"),
    "stepped_clock": Fault(
        "the clock goes forward and back by an hour (needs a C compiler)",
        step_clock,
        "versions are served again",
    ),
}


def strike(job: SoakJob, fault: Fault, timeout_s: float) -> float:
    """Inject a fault; return the seconds from its end until the run has recovered.

    Raises SoakFailed if the run ended, TimeoutError if it does not recover within `timeout_s`.
    """
    since = job.now()
    fault.inflict(job)
    over = time.monotonic()
    if fault.over == "a replica is back":
        job.wait_for("a rejoined replica", _came_back, timeout_s, since)
    elif fault.over == "the run is back":
        job.wait_for("a step of the resumed run", served(2), START_S, since=0)
    else:
        job.wait_for("two more versions served", served(2), timeout_s)
    return time.monotonic() - over


def _came_back(records: Sequence[RecordFields]) -> bool:
    fenced = {str(record["replica"]) for record in records if record["event"] == "FENCED"}
    return any(record["event"] == "REJOINED" and record["replica"] in fenced for record in records)
