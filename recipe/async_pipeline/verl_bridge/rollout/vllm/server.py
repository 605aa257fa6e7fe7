# SPDX-License-Identifier: Apache-2.0
"""verl's vLLM server, which also loads published versions and records which version wrote which token."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import psutil
import ray
from cachetools import LRUCache
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

from ....core.deadline import unless_broken, within
from ....core.items import LoadReport
from ....core.staleness import check_served
from ....errors import CorruptionError, WeightSyncError
from ....weight_sync.arena import ArenaReader
from ....weight_sync.board import await_manifest
from ....weight_sync.busy_time import OpenTime
from ....weight_sync.manifest import Manifest, Ticket, decode, encode
from ....weight_sync.receiver import Inbox
from ....weight_sync.versioned_engine import Loaded, LoadMode, VersionedEngine, recorded_spans
from ...control_calls import CONTROL, GIVE_UP, LOAD, ControlCalls, control
from ...cpu_platform import is_cpu
from ...direct_calls import Address, DirectCalls
from ...object_store_transport import pull_through
from . import prefork
from .plugin import IN_PROCESS

T = TypeVar("T")


MARGIN_S = 10.0
"""Added to a deadline, so that the engine's own fires first and the trainer's last: the engine's message
is the most precise.
"""


READS, READ_AGAIN_S = 4, 1.0
"""Number of reads of a bucket with a wrong checksum, and the seconds in between."""


STAGE_POLL_S = 0.02
"""Polling interval for the engine's standby copy."""


GIVEN_UP = 10_000
"""Number of given-up requests that are remembered until they begin."""


EXTENSION = "recipe.async_pipeline.verl_bridge.rollout.vllm.worker.PipelineWorkerExtension"


class PipelineVLLMServer(ControlCalls, vLLMHttpServer):
    """verl's server. Records which version wrote which tokens; see `VersionedEngine`."""

    global_steps: int | None
    """The served version, under verl's name."""
    _server_address: str
    _versioned: VersionedEngine

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reader, self._inbox = ArenaReader(), Inbox()
        self._answering: dict[str, asyncio.Task[Any]] = {}
        self._given_up: LRUCache[str, None] = LRUCache(GIVEN_UP)
        """Requests that were given up before they began: a control call can overtake them."""
        self._open = OpenTime()
        self._direct = DirectCalls(generate=self.generate)

    def _get_worker_extension_cls(self) -> str:
        return EXTENSION

    def _preprocess_engine_kwargs(self, engine_kwargs: dict[str, Any]) -> None:
        super()._preprocess_engine_kwargs(engine_kwargs)
        if self.config.tensor_model_parallel_size == 1:
            # With one device, the engine core needs no worker process.
            engine_kwargs.setdefault("distributed_executor_backend", IN_PROCESS if is_cpu() else "uni")

    async def run_server(self, args: Any) -> None:
        """Run the server on the loopback address only: its HTTP server does not authenticate requests.

        This package's requests come through Ray. On several nodes the replica keeps its node's address as
        its name.
        """
        # Other users of this machine are excluded too: the engine's sockets are in a directory open to
        # all.
        os.umask(0o077)
        prefork.use()
        node, self._server_address = self._server_address, loopback_of(self._server_address)
        await super().run_server(args)
        if sum(one["Alive"] for one in await asyncio.to_thread(ray.nodes)) > 1:
            self._server_address = node
        self._versioned = VersionedEngine(self.engine)
        self.serve_control_calls()

    @control(LOAD)
    async def load_version(
        self, offered: Ticket, courier: Any | None, piece_bytes: int, timeout_s: float, how: LoadMode
    ) -> LoadReport:
        """Fetch, check, load, verify and announce one version, in this order.

        Without a courier, the trainer's arenas can be mapped. The checksums are computed here, outside
        the engine, so that generation pauses for the copy only.

        Raises WeightSyncError if the version is not newer or is corrupt, ProofError if the served values
        differ, WaitTimeout if the engine does not respond.
        """
        started = time.perf_counter()
        if self.global_steps is not None and offered.version <= self.global_steps:
            raise WeightSyncError(
                f"replica {self.replica_rank} serves v{self.global_steps} and was offered "
                f"v{offered.version}; "
                "versions only move forward"
            )
        manifest = encode(await self._fetch(offered, courier, timeout_s))
        fetched = time.perf_counter()
        if how.stage == "device":
            staging = unless_broken(self._stage(manifest, offered.version, timeout_s), self._death)
            await self._within(
                timeout_s, staging, f"its engine to copy version {offered.version} to the device"
            )
        staged_at = time.perf_counter()

        async def load() -> Loaded:
            core = self.engine.engine_core
            # vLLM does not notify callers of this utility that the engine's process has ended.
            answer = unless_broken(
                core.call_utility_async("load_snapshot", manifest, piece_bytes, timeout_s), self._death
            )
            what = f"its engine to load version {offered.version}"
            reports, progress = await self._within(timeout_s, answer, what)
            return Loaded([LoadReport(**of_rank) for of_rank in reports], progress)

        # This may have to wait until requests end, so its deadline is longer.
        loading = self._versioned.load(
            offered.version, load, how.in_flight, reuse_prefixes=how.reuse_prefixes
        )
        loaded, read_again = await self._within(
            timeout_s + MARGIN_S, loading, f"its requests and version {offered.version}"
        )
        self.global_steps = offered.version
        # With `keep`, requests pause only for the engine's own load; before that, its step was finished.
        ended = time.perf_counter()
        kept = max(report.stall_s for report in loaded.reports)
        return LoadReport(
            transfer_s=fetched - started,
            load_s=ended - fetched,
            stall_s=kept if how.in_flight == "keep" else ended - staged_at,
            prove_s=max(report.prove_s for report in loaded.reports),
            busy_s=self._open.take(ended),
            tensors_proved=min(report.tensors_proved for report in loaded.reports),
            tokens_read_again=read_again,
        )

    async def _within(self, timeout_s: float, awaitable: Awaitable[T], what: str) -> T:
        return await within(awaitable, timeout_s, owner=f"replica {self.replica_rank}", what=what)

    async def _fetch(self, offered: Ticket, courier: Any | None, timeout_s: float) -> Manifest:
        """Bring a version into memory of this host and check it."""
        if courier is None:
            manifest = await asyncio.to_thread(await_manifest, offered, timeout_s)
            await checked(partial(self._reader.verify, manifest))
            return manifest
        described = decode(await courier.announced.remote(offered, timeout_s))
        return await self._inbox.receive(described, pull_through(courier, encode(described)))

    async def _stage(self, manifest: bytes, version: int, timeout_s: float) -> None:
        """Copy a version to the devices of all ranks, if they can; the engine generates meanwhile."""
        if not all(await self.engine.collective_rpc("stage_snapshot", timeout_s, (manifest,))):
            return
        # Polling is necessary: the copy is in another process that does not notify.
        while set(await self.engine.collective_rpc("staged_version", timeout_s)) != {version}:  # noqa: ASYNC110
            await asyncio.sleep(STAGE_POLL_S)

    @control(CONTROL)
    async def check(self) -> None:
        """Return if the engine runs its loop. Raises EngineDeadError if its process has ended."""
        await unless_broken(self.engine.engine_core.call_utility_async("is_scheduler_paused"), self._death)

    def _death(self) -> BaseException | None:
        """Return why the engine will never respond again, or None if it can."""
        return self.engine.dead_error if self.engine.errored else None

    @ray.method(concurrency_group=CONTROL)
    def processes(self) -> list[tuple[int, float]]:
        """Return id and start time of this process and its descendants, which must end before a restart."""
        own = psutil.Process()
        return [(process.pid, process.create_time()) for process in [own, *own.children(recursive=True)]]

    @control(CONTROL)
    async def open_requests(self) -> int:
        """Return the number of requests that this server works on."""
        return len(self._answering)

    @control(GIVE_UP)
    async def give_up(self, request_id: str) -> None:
        """Abandon a request; the engine forgets it, or never gets it if it has not begun."""
        task = self._answering.get(request_id)
        if task is not None:
            task.cancel()
        elif not self.config.full_determinism:
            # Otherwise the next turn may have the same id.
            self._given_up[request_id] = None

    async def direct_address(self) -> Address:
        """Return where agent loop workers of this host send requests without Ray."""
        return await self._direct.address()

    @control(CONTROL)
    async def written(
        self, request_ids: list[str]
    ) -> dict[str, tuple[list[int], list[float] | None, list[list[int]]]]:
        """Return tokens, log-probs and spans of open requests so far; omit those without a token and
        unknown ids.
        """
        return await self._versioned.written(request_ids)

    async def generate(self, *args: Any, admitted: int | None = None, **kwargs: Any) -> TokenOutput:
        """Generate as verl does, and return the versions that wrote the response instead of the last one.

        Raises VersionNotServed if this replica serves an older version than `admitted`.
        """
        request_id = kwargs["request_id"]
        if request_id in self._given_up:
            del self._given_up[request_id]
            raise asyncio.CancelledError(f"request {request_id} was given up before it began")
        check_served(self.global_steps, admitted, f"replica {self.replica_rank}")
        task = asyncio.current_task()
        assert task is not None
        self._answering[request_id] = task
        self._open.begin(time.perf_counter())
        try:
            with recorded_spans() as spans:
                output = await super().generate(*args, **kwargs)
        finally:
            self._open.end(time.perf_counter())
            del self._answering[request_id]
        output.extra_fields["min_global_steps"] = spans[0].version if spans else None
        output.extra_fields["max_global_steps"] = spans[-1].version if spans else None
        output.extra_fields["replica"] = f"replica {self.replica_rank}"
        output.extra_fields["version_spans"] = [list(span) for span in spans]
        return output


async def checked(verify: Callable[[], None]) -> None:
    """Check buckets in a thread, and read corrupt ones again: meanwhile the engine serves the old
    version.

    Raises CorruptionError if a bucket stays corrupt.
    """
    for attempt in range(1, READS + 1):
        try:
            await asyncio.to_thread(verify)
        except CorruptionError:
            if attempt == READS:
                raise
            await asyncio.sleep(READ_AGAIN_S)
        else:
            return


def loopback_of(address: str) -> str:
    """Return the loopback address of the same family."""
    return "::1" if ":" in address else "127.0.0.1"
