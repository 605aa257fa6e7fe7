# SPDX-License-Identifier: Apache-2.0
"""Training hosts on this machine: processes with private shared memory, which answer over a socket.

`gather_on_hosts.py` and `megatron/gather_on_hosts.py` are what they run.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from recipe.async_pipeline.weight_sync.hosts.host_memory import HostMemory, VersionRequest
from recipe.async_pipeline.weight_sync.hosts.host_slots import this_process
from recipe.async_pipeline.weight_sync.hosts.shares import Bucket
from recipe.async_pipeline.weight_sync.hosts.transport import header_of
from recipe.async_pipeline.weight_sync.memory.arena import ArenaReader
from recipe.async_pipeline.weight_sync.memory.manifest import (
    Announcement,
    Failure,
    decode_announcement,
    joined,
)
from tests import HANG_S, REPOSITORY
from tests.fakes.waiting import until

MOST = 0.8
"""Largest share of a version on one of two hosts: none has everything."""
PRIVATE = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'


class TrainingHost:
    """A transport from a training host in another mount namespace, over its socket."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def ask(self, *question: Any) -> Any:
        with Client(self.path) as connection:
            connection.send(question)
            return None if question[0] == "next" else connection.recv()

    async def announced(self) -> Announcement:
        found = decode_announcement(await asyncio.to_thread(self.ask, "announced"))
        assert not isinstance(found, Failure)
        return found

    async def bucket(self, bucket: Bucket, attempt: int, base: int | None = None) -> tuple[bytes, Any]:
        payload = await asyncio.to_thread(self.ask, "bucket", bucket.sequence)
        return header_of(await self.announced(), bucket.sequence, bucket.share), payload


@contextmanager
def training_hosts(
    commands: Sequence[Sequence[str]], folder: Path, environment: Mapping[str, str]
) -> Iterator[list[TrainingHost]]:
    """Run a command on each host and wait for their sockets, `host-N` in the folder; all must end well."""
    processes = [
        subprocess.Popen(
            ["unshare", "-m", "bash", "-c", PRIVATE, "_", *command],
            cwd=REPOSITORY,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for command in commands
    ]
    hosts = [folder / f"host-{number}" for number in range(len(commands))]
    try:
        until(
            lambda: all(host.exists() for host in hosts) or any(p.poll() is not None for p in processes),
            "a share of each host",
        )
        if all(host.exists() for host in hosts):
            yield [TrainingHost(host) for host in hosts]
        errors = [process.communicate(timeout=HANG_S)[1] for process in processes]
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert [process.returncode for process in processes] == [0] * len(processes), errors


async def versions_of(hosts: Sequence[TrainingHost], count: int) -> AsyncIterator[dict[str, torch.Tensor]]:
    """Yield the tensors of so many versions, as a consumer on another host gets them.

    Asserts that the hosts share no file and that each has a part only.
    """
    memory, reader = HostMemory("the consumer's"), this_process("a test")
    try:
        for _ in range(count):
            shares = [replace(host.ask("ticket"), host=f"host {i}") for i, host in enumerate(hosts)]
            yield ArenaReader().tensors(
                await memory.fetch(VersionRequest(joined(shares), hosts, HANG_S), reader)
            )
            files = [host.ask("files") for host in hosts]
            assert not set(files[0]) & set(files[1]) and all(files)
            sizes = [share.num_bytes for share in shares]
            assert max(sizes) < MOST * sum(sizes)
            for host in hosts:
                host.ask("next")
    finally:
        await memory.close()
