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
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

from ....core.clock import unless_broken, within
from ....core.items import LoadReport
from ....errors import CorruptionError, WeightSyncError
from ....weight_sync.arena import ArenaReader
from ....weight_sync.board import await_manifest
from ....weight_sync.busy_time import OpenTime
from ....weight_sync.manifest import Manifest, Ticket, decode, encode
from ....weight_sync.receiver import Inbox
from ....weight_sync.versioned_engine import Loaded, LoadMode, VersionedEngine, recorded_spans
from ...cpu_platform import is_cpu
from ...object_store_transport import pull_through
from . import prefork
from .plugin import IN_PROCESS

T = TypeVar("T")


MARGIN_S = 10.0
"""The engine's own deadline fires first, because its message knows more; and both before the trainer's."""


READS, READ_AGAIN_S = 4, 1.0
"""How often a bucket with another checksum is read, and the seconds in between."""


STAGE_POLL_S = 0.02
"""How often the engine is asked whether its spare copy is complete."""


EXTENSION = "recipe.async_pipeline.verl_bridge.rollout.vllm.worker.PipelineWorkerExtension"


class PipelineVLLMServer(vLLMHttpServer):
    """verl's server. What each version wrote of an answer is recorded; see `VersionedEngine`."""

    global_steps: int | None
    """The version that is served; verl's own name for it."""
    _server_address: str
    _versioned: VersionedEngine

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reader, self._inbox = ArenaReader(), Inbox()
        self._answering: dict[str, asyncio.Task[Any]] = {}
        self._open = OpenTime()

    def _get_worker_extension_cls(self) -> str:
        return EXTENSION

    def _preprocess_engine_kwargs(self, engine_kwargs: dict[str, Any]) -> None:
        super()._preprocess_engine_kwargs(engine_kwargs)
        if self.config.tensor_model_parallel_size == 1:
            # One device needs no process of its own beside the engine core.
            engine_kwargs.setdefault("distributed_executor_backend", IN_PROCESS if is_cpu() else "uni")

    async def run_server(self, args: Any) -> None:
        """As verl's, but out of reach for other machines: its HTTP server asks nobody who they are.

        Requests of this pipeline come through Ray. On several nodes the replica keeps its node's address as
        its name.
        """
        # Nor for other users of this one: the engine's sockets lie in a directory that all can enter.
        os.umask(0o077)
        prefork.use()
        node, self._server_address = self._server_address, loopback_of(self._server_address)
        await super().run_server(args)
        if sum(one["Alive"] for one in await asyncio.to_thread(ray.nodes)) > 1:
            self._server_address = node
        self._versioned = VersionedEngine(self.engine)

    async def load_version(
        self, offered: Ticket, courier: Any | None, piece_bytes: int, timeout_s: float, how: LoadMode
    ) -> LoadReport:
        """Fetch, check, load, prove and announce one version, in this order.

        Without a courier, the trainer's arenas can be mapped. The checksums are computed here, outside the
        engine,
        so that generation stands still only for the copy.

        Raises WeightSyncError: not newer, or corrupt. ProofError: not what is served. WaitTimeout: the engine
        does
        not answer.
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
            # vLLM does not tell those who wait for such an answer that its process has ended.
            answer = unless_broken(
                core.call_utility_async("load_snapshot", manifest, piece_bytes, timeout_s), self._death
            )
            what = f"its engine to load version {offered.version}"
            reports, progress = await self._within(timeout_s, answer, what)
            return Loaded([LoadReport(**of_rank) for of_rank in reports], progress)

        # Its requests may have to end first, for which nobody else waits.
        loading = self._versioned.load(
            offered.version, load, how.in_flight, reuse_prefixes=how.reuse_prefixes
        )
        loaded, read_again = await self._within(
            timeout_s + MARGIN_S, loading, f"its requests and version {offered.version}"
        )
        self.global_steps = offered.version
        # Requests that are kept wait for no longer than the engine itself takes; before that its step was
        # finished.
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
        """Have a version in memory of this host, checked."""
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
        # The copy is in another process, which can be asked but does not call.
        while set(await self.engine.collective_rpc("staged_version", timeout_s)) != {version}:  # noqa: ASYNC110
            await asyncio.sleep(STAGE_POLL_S)

    async def check(self) -> None:
        """Return if the engine turns its loop. Raises EngineDeadError: its process has ended."""
        await unless_broken(self.engine.engine_core.call_utility_async("is_scheduler_paused"), self._death)

    def _death(self) -> BaseException | None:
        """Why the engine will not answer any more; None: it will."""
        return self.engine.dead_error if self.engine.errored else None

    def processes(self) -> list[tuple[int, float]]:
        """Id and start time of this process and of all below it: what must end before another one starts
        here.
        """
        own = psutil.Process()
        return [(process.pid, process.create_time()) for process in [own, *own.children(recursive=True)]]

    async def give_up(self, request_id: str) -> None:
        """End a request that is being answered; the engine forgets it. One that is not is left alone."""
        task = self._answering.get(request_id)
        if task is not None:
            task.cancel()

    async def written(
        self, request_ids: list[str]
    ) -> dict[str, tuple[list[int], list[float] | None, list[list[int]]]]:
        """Tokens, log-probs and spans that requests have so far; those that have none, or are not here,
        are left out.
        """
        return await self._versioned.written(request_ids)

    async def generate(self, *args: Any, **kwargs: Any) -> TokenOutput:
        """As verl's, with the versions that wrote the answer instead of the one that is served at its end."""
        request_id = kwargs["request_id"]
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
    """Check buckets in a thread. What is corrupt is read again a little later: the engine still serves what
    it served.

    Raises CorruptionError: it stays so.
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
    """The loopback address of the same family."""
    return "::1" if ":" in address else "127.0.0.1"
