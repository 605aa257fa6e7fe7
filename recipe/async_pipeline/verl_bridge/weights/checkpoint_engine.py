# SPDX-License-Identifier: Apache-2.0
"""`checkpoint_engine.backend=dual_buffer`: weight versions through shared host memory.

The trainer of this package calls `gather_parts`, or `gather` if the training engine has to assemble its
tensors, and the replicas pull the manifest; only the gather blocks training. verl's managers can also use
this engine, through `send_weights` and `receive_weights`, which block as in verl's engines.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Generator, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from ...errors import WeightSyncError
from ...weight_sync.hosts.shares import HostRanks
from ...weight_sync.memory.arena import ArenaReader, ArenaWriter, HeldBlock
from ...weight_sync.memory.board import Board, await_manifest
from ...weight_sync.memory.manifest import Manifest, WeightTicket, decode_ticket, encode

POLL_S = 0.002
"""Polling interval of a receiver under verl's manager; sender and receiver start together."""


@CheckpointEngineRegistry.register("dual_buffer")
class DualBufferCheckpointEngine(CheckpointEngine):
    """The engine of one worker process. Only the master of the training side owns arenas."""

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        rollout_dtype: str | None = "bfloat16",
        proof_tensors: int = 16,
        timeout_s: float = 600.0,
    ) -> None:
        """Cast floating-point tensors to `rollout_dtype`, unless it is None. `bucket_size` is in bytes."""
        dtype = None if rollout_dtype is None else getattr(torch, rollout_dtype)
        self._new_writer = partial(ArenaWriter, bucket_size, proof_tensors, dtype)
        self._is_master = is_master
        self._writer: ArenaWriter | None = None
        self._reader = ArenaReader()
        self._piece_bytes = bucket_size
        self._timeout_s = timeout_s
        self._board: Board | None = None

    def gather(
        self, weights: Iterable[tuple[str, torch.Tensor]], version: int, adapter: str | None = None
    ) -> WeightTicket | None:
        """Copy assembled weights, or the tensors of an adapter, into an arena. A collective.

        Returns the ticket on the master and None on other ranks. Raises WeightSyncError if the version is not
        newer than the last one.
        """
        if not self._is_master:
            # Consume the weights to take part in the collectives.
            for _ in weights:
                pass
            return None
        self._writer = self._writer or self._new_writer()
        return self._writer.gather(version, weights, adapter)

    def gather_parts(
        self, parts: Sequence[HeldBlock], version: int, ranks: HostRanks, adapter: str | None = None
    ) -> WeightTicket | None:
        """Copy the blocks of each rank into an arena without assembling tensors; otherwise like `gather`.

        One rank of each host gets a ticket for the share of that host.
        """
        self._writer = self._writer or self._new_writer(ranks)
        return self._writer.gather_parts(version, parts, adapter)

    # verl's protocol. The ticket is posted on a board in shared memory, whose name `prepare` returns.

    def prepare(self) -> dict[str, Any]:
        if not self._is_master:
            return {}
        self._board = self._board or Board()
        self._board.clear()
        return {"board": self._board.name}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        board = next((m["board"] for m in metadata if m), None)
        return {"board": [board] * actor_wg_world_size}, {"board": [board] * rollout_world_size}

    def init_process_group(self, board: str) -> None:
        if not self._is_master:
            self._board = Board(board)

    def finalize(self) -> None:
        if self._is_master and self._board is not None:
            self._board.clear()

    async def send_weights(
        self, weights: Generator[tuple[str, torch.Tensor], None, None], global_steps: int | None = None
    ) -> dict[str, float]:
        version = 0 if global_steps is None else global_steps
        ticket = self.gather(weights, version)
        if ticket is not None and self._board is not None:
            self._board.post(encode(ticket))
        return {}

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:  # type: ignore[override]
        manifest = await self._read_board()
        await asyncio.to_thread(self._reader.verify, manifest)
        for piece in self._reader.read(manifest, self._piece_bytes):
            for name, tensor in piece:
                yield name, tensor

    async def _read_board(self) -> Manifest:
        if self._board is None:
            raise WeightSyncError("receive_weights before init_process_group")
        deadline = time.monotonic() + self._timeout_s
        while time.monotonic() < deadline:
            posted = self._board.read()
            if posted is not None:
                return await asyncio.to_thread(await_manifest, decode_ticket(posted), self._timeout_s)
            await asyncio.sleep(POLL_S)
        raise WeightSyncError(f"the trainer published no weights within {self._timeout_s:g} s")

    def close(self) -> None:
        """Unlink the arenas at a clean exit.

        After a kill, the worker's resource tracker does it, or if Ray has killed that too, the next
        `sweep_orphans` on this host.
        """
        if self._writer is not None:
            self._writer.close()
        if self._is_master and self._board is not None:
            self._board.close()
