# SPDX-License-Identifier: Apache-2.0
"""The rollout servers of all engines: they load published versions and record which version wrote a token."""

from __future__ import annotations

import asyncio
import os
import time
from abc import abstractmethod
from collections.abc import Awaitable, Sequence
from typing import Any, NamedTuple, TypeVar

import psutil
import ray
from cachetools import LRUCache
from verl.workers.rollout.replica import TokenOutput

from ...core.groups.items import LoadReport
from ...core.lag.staleness import check_served
from ...core.waits.deadline import unless_broken, within
from ...errors import StagingError, WaitTimeout, WeightSyncError
from ...weight_sync.engine.serving_rank import OpenTime, await_staged
from ...weight_sync.engine.versioned_engine import Loaded, LoadMode, Salts, VersionedEngine, recorded_spans
from ...weight_sync.fleet.preparation import Preparation
from ...weight_sync.hosts.host_slots import Reader, this_process
from ...weight_sync.memory.manifest import Manifest, WeightTicket, encode, over_nodes
from ..agent_loop.tokens.partial_rollouts import as_array
from ..calls.control_calls import CONTROL, GIVE_UP, LOAD, ControlCalls, PacedStarts, control
from ..calls.direct_calls import Address, DirectCalls
from ..weights.host_memory_service import HostMemories

T = TypeVar("T")


MARGIN_S = 10.0
"""Added to a deadline, so that the engine's own, whose message is the most precise, fires first."""


GIVEN_UP = 10_000
"""Number of given-up requests that are remembered until they begin."""


class Prepared(NamedTuple):
    """A version that can be committed."""

    manifest: bytes
    """Encoded; its memory can be mapped on this host."""
    memories: HostMemories
    """The services that keep it."""
    transfer_s: float
    stage_s: float
    staging_error: str = ""
    """Why it is not on the devices although it was to be staged there; empty if it is."""


class FurtherServer(NamedTuple):
    """A further server of a replica over several nodes, for the first one, which has the engine."""

    server: Any
    """Its handle."""
    node: str
    """Its Ray node."""
    reader: Reader
    """Its process, which holds the lease of a version in the memory of its node."""


class VersionedServer(ControlCalls):
    """Base of a server class, before verl's class, which must be able to generate.

    Of a replica over several nodes, only the first server gets versions and requests. It has each version
    brought into the memory of every node, where the ranks of that node map it.
    """

    config: Any
    replica_rank: int
    node_rank: int
    global_steps: int | None
    """The served version, under verl's name."""
    _versioned: VersionedEngine[Any, Any]
    """To be set when the engine has started."""
    _members: Sequence[FurtherServer] = ()
    """The further servers of the replica, in the order of their nodes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._preparation: Preparation[Prepared] = Preparation(f"replica {self.replica_rank}")
        self._reader = this_process(f"replica {self.replica_rank}, server {self.node_rank}")
        self._committing = asyncio.Lock()
        self._report: LoadReport | None = None
        """The report of the served version."""
        self._answering: dict[str, asyncio.Task[Any]] = {}
        self._given_up: LRUCache[str, None] = LRUCache(GIVEN_UP)
        """Requests that were given up before they began: a control call can overtake them."""
        self._open, self._starts = OpenTime(), PacedStarts()
        self._direct = DirectCalls(
            generate=self.generate,
            check=self.check,
            prepare_version=self.prepare_version,
            commit_version=self.commit_version,
        )

    @abstractmethod
    async def _load_into_engine(
        self, manifest: bytes, piece_bytes: int, timeout_s: float, salts: Salts | None
    ) -> Loaded:
        """Load a version between two steps of the engine. Requests that wait for their first step get the
        salt of the new version; see `Salts`.

        Raises WeightSyncError, ProofError, or what `_death` returns if the engine dies.
        """

    @abstractmethod
    async def _stage_boards(self, manifest: bytes, timeout_s: float) -> list[str | None]:
        """Begin to copy a version to the devices of all ranks; return their boards, or None if it cannot."""

    @abstractmethod
    async def _answers(self) -> None:
        """Return if the engine runs its loop."""

    @abstractmethod
    def _death(self) -> BaseException | None:
        """Return why the engine will never respond again, or None if it can."""

    @control(CONTROL)
    async def place(self) -> tuple[str, Reader]:
        """Return the Ray node of this server, and its process as a reader of versions there."""
        return ray.get_runtime_context().get_node_id(), self._reader

    @control(CONTROL)
    async def join(self, members: Sequence[FurtherServer]) -> None:
        """Take the further servers of this replica, in the order of their nodes."""
        self._members = members

    @control(LOAD)
    async def prepare_version(
        self, offered: WeightTicket, memories: HostMemories, timeout_s: float, stage: str
    ) -> str:
        """Fetch, check and stage one version, while the engine generates with the one before.

        The memory service of this host receives and checks it. Takes the place of an older version that was
        prepared or is being prepared. Returns at once if the version is prepared or served already.
        Returns why the version could not be staged, in which case it is loaded from host memory, or nothing.

        Raises WeightSyncError if the version is older or corrupt, WaitTimeout if the engine does not respond.
        """
        if self.global_steps is not None and offered.version <= self.global_steps:
            if offered.version == self.global_steps:
                return ""
            raise WeightSyncError(
                f"replica {self.replica_rank} serves v{self.global_steps} and was offered "
                f"v{offered.version}; versions only move forward"
            )
        prepared = await self._preparation.prepare(
            offered.version, lambda: self._prepare(offered, memories, timeout_s, stage)
        )
        return prepared.staging_error

    @control(LOAD)
    async def commit_version(
        self, version: int, piece_bytes: int, timeout_s: float, how: LoadMode
    ) -> LoadReport:
        """Load, verify and announce the prepared version, in this order.

        Returns the report of the load at once if the version is served already. Raises WeightSyncError if
        the version is not prepared, ProofError if the served values differ, WaitTimeout if the engine does
        not respond.
        """
        async with self._committing:
            if version != self.global_steps or self._report is None:
                prepared = self._preparation.prepared(version)
                self._report = await self._commit(version, prepared, piece_bytes, timeout_s, how)
                self._preparation.drop()
                await self._release(prepared.memories, version)
            return self._report

    async def _prepare(
        self, offered: WeightTicket, memories: HostMemories, timeout_s: float, stage: str
    ) -> Prepared:
        started = time.perf_counter()
        manifest = encode(await self._fetch(offered, memories, timeout_s))
        fetched, staging_error = time.perf_counter(), ""
        if stage == "device":
            staging = unless_broken(self._stage(manifest, offered.version, timeout_s), self._death)
            what = f"its engine to copy version {offered.version} to the device"
            try:
                await self._within(timeout_s, staging, what)
            except StagingError as error:
                staging_error = str(error)
        return Prepared(
            manifest,
            memories,
            transfer_s=fetched - started,
            stage_s=time.perf_counter() - fetched,
            staging_error=staging_error,
        )

    async def _fetch(self, offered: WeightTicket, memories: HostMemories, timeout_s: float) -> Manifest:
        """Have a version brought into the memory of every node of this replica."""
        return over_nodes(
            await asyncio.gather(
                memories.fetch(offered, self._reader, timeout_s),
                *(memories.fetch(offered, one.reader, timeout_s, one.node) for one in self._members),
            )
        )

    async def _release(self, memories: HostMemories, version: int) -> None:
        await asyncio.gather(
            memories.release(self._reader, version),
            *(memories.release(one.reader, version, one.node) for one in self._members),
        )

    async def _commit(
        self, version: int, prepared: Prepared, piece_bytes: int, timeout_s: float, how: LoadMode
    ) -> LoadReport:
        started = time.perf_counter()

        async def load() -> Loaded:
            # Engines do not notify callers that their process has ended.
            salts = self._versioned.salts(version)
            loading = self._load_into_engine(prepared.manifest, piece_bytes, timeout_s, salts)
            what = f"its engine to load version {version}"
            return await self._within(timeout_s, unless_broken(loading, self._death), what)

        # This may have to wait until requests end, so its deadline is longer.
        loading = self._versioned.load(version, load, how.in_flight, reuse_prefixes=how.reuse_prefixes)
        loaded, read_again = await self._within(
            timeout_s + MARGIN_S, loading, f"its requests and version {version}"
        )
        self.global_steps = version
        # With `keep`, requests pause only for the engine's own load; before that, its step was finished.
        ended = time.perf_counter()
        kept = max(report.stall_s for report in loaded.reports)
        ranks = LoadReport.total(loaded.reports)
        return LoadReport(
            transfer_s=prepared.transfer_s,
            load_s=prepared.stage_s + ended - started,
            commit_s=ended - started,
            stall_s=kept if how.in_flight == "keep" else ended - started,
            prove_s=max(report.prove_s for report in loaded.reports),
            busy_s=self._open.take(ended),
            tensors_proved=min(report.tensors_proved for report in loaded.reports),
            elements_served=ranks.elements_served,
            elements_explained=ranks.elements_explained,
            unexplained=ranks.unexplained,
            tokens_read_again=read_again,
        )

    async def _within(self, timeout_s: float, awaitable: Awaitable[T], what: str) -> T:
        return await within(awaitable, timeout_s, owner=f"replica {self.replica_rank}", what=what)

    async def _stage(self, manifest: bytes, version: int, timeout_s: float) -> None:
        """Copy a version to the devices of all ranks, if they can; the engine generates meanwhile.

        Raises StagingError if it fails while the engine works.
        """
        try:
            boards = await self._stage_boards(manifest, timeout_s)
        except WaitTimeout:
            raise
        except Exception as error:  # engines raise errors of various types
            if self._death() is not None:
                raise
            raise StagingError(f"{type(error).__name__}: {error}") from error
        if not all(boards):
            return
        # In the order of the ranks: as many of each node.
        ranks = len(boards) // (1 + len(self._members))
        own, *others = [boards[start : start + ranks] for start in range(0, len(boards), ranks)]
        ends = await asyncio.gather(
            self.staged(own, version),
            *(
                one.server.staged.remote(part, version)
                for one, part in zip(self._members, others, strict=True)
            ),
            return_exceptions=True,  # no rank may still copy when this returns
        )
        for end in ends:
            if end is not None:
                raise end

    @control(LOAD)
    async def staged(self, boards: Sequence[str], version: int) -> None:
        """Wait until the ranks of this node have copied a version to their devices.

        Raises StagingError if a copy failed, and WeightSyncError if a newer version took its place.
        """
        await await_staged(boards, version)

    @control(CONTROL)
    async def check(self) -> None:
        """Return if the engine runs its loop, or the processes of its ranks on a further node run.

        Raises what `_death` returns if a process has ended.
        """
        if not self.node_rank:
            await unless_broken(self._answers(), self._death)
        elif (death := self._death()) is not None:
            raise death

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

    @control(CONTROL)
    async def direct_address(self) -> Address:
        """Return where agent loop workers and the trainer, if on this host, call this server without Ray."""
        return await self._direct.address()

    @control(CONTROL)
    async def written(
        self, request_ids: list[str]
    ) -> dict[str, tuple[Sequence[int], Sequence[float] | None, list[list[int]]]]:
        """Return tokens, log-probs and spans of open requests so far; omit those without a token and
        unknown ids. As arrays, which take no time to pickle.
        """
        written = await self._versioned.written(request_ids)
        return {
            name: (as_array("q", tokens), None if log_probs is None else as_array("d", log_probs), spans)
            for name, (tokens, log_probs, spans) in written.items()
        }

    async def generate(
        self, *args: Any, admitted: int | None = None, session: int | None = None, **kwargs: Any
    ) -> TokenOutput:
        """Generate as verl does, and return the versions that wrote the response instead of the last one.

        `session`: see `recorded_spans`. Raises VersionNotServed if this replica serves an older version than
        `admitted`.
        """
        request_id = kwargs["request_id"]
        await self._starts.turn()
        if request_id in self._given_up:
            del self._given_up[request_id]
            raise asyncio.CancelledError(f"request {request_id} was given up before it began")
        check_served(self.global_steps, admitted, f"replica {self.replica_rank}")
        task = asyncio.current_task()
        assert task is not None
        self._answering[request_id] = task
        self._open.begin(time.perf_counter())
        try:
            with recorded_spans(session, admitted) as spans:
                output: TokenOutput = await super().generate(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._open.end(time.perf_counter())
            del self._answering[request_id]
        output.extra_fields["min_global_steps"] = spans[0].version if spans else None
        output.extra_fields["max_global_steps"] = spans[-1].version if spans else None
        output.extra_fields["replica"] = f"replica {self.replica_rank}"
        output.extra_fields["version_spans"] = [list(span) for span in spans]
        return output


async def is_one_node() -> bool:
    """Return whether the Ray cluster has one node. Then each server's name can be a loopback address."""
    return sum(bool(one["Alive"]) for one in await asyncio.to_thread(ray.nodes)) <= 1


def loopback_of(address: str) -> str:
    """Return the loopback address of the same family."""
    return "::1" if ":" in address else "127.0.0.1"


def name_node(address: str, *variables: str) -> None:
    """Set environment variables by which the ranks of a replica on several nodes find each other.

    Each of `variables` gets the address of this node, and gloo the network interface that has it: otherwise
    gloo takes the host's name, which may be a loopback address. Values that are set stay.
    """
    for variable in variables:
        os.environ.setdefault(variable, address)
    names = [
        name for name, those in psutil.net_if_addrs().items() if address in [one.address for one in those]
    ]
    if names:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", names[0])
