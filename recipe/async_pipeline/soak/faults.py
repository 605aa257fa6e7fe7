# SPDX-License-Identifier: Apache-2.0
"""What is done to a run, and what shows that it has recovered.

Each fault is a function that inflicts it and, if it passes by itself, waits until it has passed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import psutil

from ..weight_sync.segment_names import SHM_DIR, open_own
from .job import ENGINE, SERVER, START_S, Record, SoakFailed, SoakJob
from .processes import send
from .small_disk import empty, fill

STALL_FACTOR, STALL_S, SLICE_S = 50, 5.0, 0.01
"""A stalled engine gets one slice in so many, for so long."""
MISJUDGED_S = 8.0
CORRUPT_S, STOPPED_S = 1.5, 5.0
NEAR = 1 << 16
FULL_S = 120.0
BURST, PAUSE_S, BURST_LIMIT_S = 2048, 2.0, 120.0
NEXT_VERSION_S = 60.0


class Fault(NamedTuple):
    """One kind of fault."""

    text: str
    inflict: Callable[[SoakJob], None]
    over: Literal["a replica is back", "versions are served again", "the run is back"]
    """What shows that the run has recovered."""


def kill_engine(job: SoakJob) -> None:
    send(job.pick(ENGINE).pid, signal.SIGKILL)


def kill_replica(job: SoakJob) -> None:
    send(job.pick(SERVER).pid, signal.SIGKILL)


def kill_receiver(job: SoakJob) -> None:
    """As soon as a version was gathered, so that the engine dies while it loads it, or right before or
    after.
    """
    engine = job.pick(ENGINE)
    job.wait_for("a version that is gathered", _has("GATHERED"), NEXT_VERSION_S)
    send(engine.pid, signal.SIGKILL)


def stall_replica(job: SoakJob) -> None:
    engine, until = job.pick(ENGINE), time.monotonic() + STALL_S
    while time.monotonic() < until:
        send(engine.pid, signal.SIGSTOP)
        time.sleep(SLICE_S * (STALL_FACTOR - 1))
        send(engine.pid, signal.SIGCONT)
        time.sleep(SLICE_S)


def corrupt_bucket(job: SoakJob) -> None:
    """One bit of each bucket, once the checksums are known and before a replica has looked at them; then
    it heals.
    """
    deadline = time.monotonic() + NEXT_VERSION_S
    while not _flip_while_nobody_looks(job):
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"{NEXT_VERSION_S:g} s without a version that is gathered while the replicas stand still"
            )
        time.sleep(CORRUPT_S)


def _flip_while_nobody_looks(job: SoakJob) -> bool:
    """False: no version came while the replicas stood still, since they had to answer something for it;
    nothing was flipped.
    """
    servers = [found.pid for found in job.processes(SERVER)]
    for pid in servers:
        send(pid, signal.SIGSTOP)
    try:
        job.wait_for("a version that is gathered", _has("GATHERED"), STOPPED_S)
        time.sleep(CORRUPT_S)
        flipped = [flip for name in _buckets(job) if (flip := _flip(name, job.random.random())) is not None]
    except TimeoutError:
        return False
    finally:
        for pid in servers:
            send(pid, signal.SIGCONT)
    time.sleep(CORRUPT_S)
    for name, place, found in flipped:
        _heal(name, place, found)
    return True


def _buckets(job: SoakJob) -> list[str]:
    """The large segments of the processes of a run."""
    pids = {str(found.pid) for found in job.processes()}
    mine = [path for path in SHM_DIR.glob("async_pipeline-*") if path.name.split("-")[2] in pids]
    largest = max((path.stat().st_size for path in mine), default=0)
    return [path.name for path in mine if path.stat().st_size * 2 > largest]


def _flip(name: str, where: float) -> tuple[str, int, int] | None:
    """Name, place and the byte as it was; near the beginning, where tensors are. None: nothing is there."""
    fd = open_own(name)
    try:
        text = os.pread(fd, NEAR, 0)
        used = [i for i, byte in enumerate(text) if byte]
        if not used:
            return None
        place = used[int(where * len(used))]
        os.pwrite(fd, bytes([text[place] ^ 1]), place)
        return name, place, text[place]
    finally:
        os.close(fd)


def _heal(name: str, place: int, byte: int) -> None:
    """Unless somebody has written there meanwhile."""
    if not (SHM_DIR / name).exists():
        return
    fd = open_own(name)
    try:
        if os.pread(fd, 1, place) == bytes([byte ^ 1]):
            os.pwrite(fd, bytes([byte]), place)
    finally:
        os.close(fd)


def _judge(mood: str) -> Callable[[SoakJob], None]:
    def misjudge(job: SoakJob) -> None:
        control = control_of(job.folder)
        control.write_text(mood)
        time.sleep(MISJUDGED_S)
        control.unlink()

    return misjudge


def control_of(folder: Path) -> Path:
    """The file that tells the judge how to judge."""
    return folder / "judge"


def kill_run(job: SoakJob) -> None:
    job.kill()
    job.start()


def full_disk(job: SoakJob) -> None:
    """Until a checkpoint could not be written."""
    disk, since = job.folder / "disk", job.log.stat().st_size
    fill(disk)
    try:
        job.wait_for_line("has no checkpoint, those before stay", FULL_S, since)
    finally:
        empty(disk)


def burst(job: SoakJob) -> None:
    """Requests of somebody else, all at once, while the engine stands still."""
    server = job.pick(SERVER)
    engines = [
        child.pid
        for child in psutil.Process(server.pid).children(recursive=True)
        if "EngineCore" in " ".join(child.cmdline())
    ]
    asyncio.run(_burst(_port_of(server.pid), engines))


async def _burst(port: int, engines: Sequence[int]) -> None:
    import aiohttp  # noqa: PLC0415  only this fault needs it

    base = f"http://127.0.0.1:{port}/v1"
    timeout = aiohttp.ClientTimeout(total=BURST_LIMIT_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        async with session.get(f"{base}/models") as answer:
            model = (await answer.json())["data"][0]["id"]

        async def ask() -> int:
            request = {"model": model, "prompt": [1, 2, 3], "max_tokens": 1}
            async with session.post(f"{base}/completions", json=request) as answer:
                await answer.read()
                return answer.status

        for pid in engines:
            send(pid, signal.SIGSTOP)
        try:
            asking = [asyncio.create_task(ask()) for _ in range(BURST)]
            await asyncio.sleep(PAUSE_S)
        finally:
            for pid in engines:
                send(pid, signal.SIGCONT)
        answered = await asyncio.gather(*asking, return_exceptions=True)
    lost = [one for one in answered if one != 200]
    if lost:
        raise SoakFailed(f"{len(lost)} of {BURST} requests were not answered, e.g. {lost[0]!r}")


def _port_of(pid: int) -> int:
    """Where a process answers HTTP on this machine. Raises SoakFailed: nowhere."""
    for connection in psutil.Process(pid).net_connections(kind="tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.ip in ("127.0.0.1", "::1"):
            return int(connection.laddr.port)
    raise SoakFailed(f"process {pid} does not listen on this machine")


def _has(event: str) -> Callable[[Sequence[Record]], bool]:
    return lambda records: any(record["event"] == event for record in records)


FAULTS: Mapping[str, Fault] = {
    "kill_engine": Fault("SIGKILL of a vLLM engine core", kill_engine, "a replica is back"),
    "kill_replica": Fault("SIGKILL of a replica's server", kill_replica, "a replica is back"),
    "kill_receiver": Fault(
        "SIGKILL of an engine core while it gets new weights", kill_receiver, "a replica is back"
    ),
    "stall_replica": Fault(
        f"an engine core {STALL_FACTOR} times slower for {STALL_S:g} s",
        stall_replica,
        "versions are served again",
    ),
    "corrupt_bucket": Fault(
        "a flipped bit in weights on their way", corrupt_bucket, "versions are served again"
    ),
    "slow_reward": Fault(
        "one answer in four takes a second to score", _judge("slow"), "versions are served again"
    ),
    "raising_reward": Fault(
        "the reward function raises for one answer in four", _judge("raise"), "versions are served again"
    ),
    "hanging_reward": Fault(
        "the reward function hangs for one answer in four", _judge("hang"), "versions are served again"
    ),
    "full_disk": Fault(
        "no byte is left for a checkpoint (needs root, to mount a small disk)",
        full_disk,
        "versions are served again",
    ),
    "burst": Fault(
        f"{BURST} requests of somebody else while an engine stands still", burst, "versions are served again"
    ),
    "kill_run": Fault(
        "SIGKILL of every process of the run, then the same command", kill_run, "the run is back"
    ),
}


def strike(job: SoakJob, fault: Fault, timeout_s: float) -> float:
    """Inflict a fault; returns the seconds from its end until the run has recovered.

    Raises SoakFailed: the run ended. TimeoutError: it does not recover.
    """
    since = job.now()
    fault.inflict(job)
    over = time.monotonic()
    if fault.over == "a replica is back":
        job.wait_for("a replica that is back", _came_back, timeout_s, since)
    elif fault.over == "the run is back":
        job.wait_for("a step of the run that goes on", _served(2), START_S, since=0)
    else:
        job.wait_for("two more versions served", _served(2), timeout_s)
    return time.monotonic() - over


def _came_back(records: Sequence[Record]) -> bool:
    fenced = {str(record["replica"]) for record in records if record["event"] == "FENCED"}
    return any(record["event"] == "REJOINED" and record["replica"] in fenced for record in records)


def _served(versions: int) -> Callable[[Sequence[Record]], bool]:
    return lambda records: sum(record["event"] == "SERVED" for record in records) >= versions
