# SPDX-License-Identifier: Apache-2.0
"""`checkpoint_engine.backend=dual_buffer`: weight versions through shared host memory.

The trainer of this package uses `gather` alone and lets the replicas pull the manifest; nothing waits
but the gather. Verl's own managers may drive the same engine through `send_weights` and
`receive_weights`, in which case they wait as they always do.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Generator
from pathlib import Path
from typing import Any

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from ..errors import WeightSyncError
from ..weight_sync.arena import ArenaReader, ArenaWriter
from ..weight_sync.manifest import Manifest, decode, encode
from ..weight_sync.segment_names import SHM_DIR, new_name

POLL_S = 0.002
"""How often a receiver under verl's manager looks for the manifest; sender and receiver start together."""


@CheckpointEngineRegistry.register("dual_buffer")
class DualBufferCheckpointEngine(CheckpointEngine):
    """One per worker process. Only the master of the training side owns arenas."""

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        rollout_dtype: str | None = "bfloat16",
        proof_tensors: int = 16,
        timeout_s: float = 600.0,
    ) -> None:
        """`bucket_size` in bytes; `rollout_dtype` is what floating tensors are cast to, None keeps theirs."""
        dtype = None if rollout_dtype is None else getattr(torch, rollout_dtype)
        self._writer = ArenaWriter(bucket_size, proof_tensors, dtype) if is_master else None
        self._reader = ArenaReader()
        self._piece_bytes = bucket_size
        self._timeout_s = timeout_s
        self._board: Path | None = None

    def gather(self, weights: Generator[tuple[str, torch.Tensor], None, None], version: int) -> bytes | None:
        """All training ranks call this together; the master returns the encoded manifest, others None.

        Raises WeightSyncError: the version is not newer than the last.
        """
        if self._writer is None:
            for _ in weights:  # take part in the collectives
                pass
            return None
        return encode(self._writer.gather(version, weights))

    # verl's own protocol. The manifest is left on a board in shared memory whose name `prepare` hands out.

    def prepare(self) -> dict[str, Any]:
        if self._writer is None:
            return {}
        self._board = self._board or SHM_DIR / new_name()
        self._board.unlink(missing_ok=True)
        return {"board": str(self._board)}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        board = next((m["board"] for m in metadata if m), None)
        return {"board": [board] * actor_wg_world_size}, {"board": [board] * rollout_world_size}

    def init_process_group(self, board: str) -> None:
        self._board = Path(board)

    def finalize(self) -> None:
        if self._writer is not None and self._board is not None:
            self._board.unlink(missing_ok=True)

    async def send_weights(
        self, weights: Generator[tuple[str, torch.Tensor], None, None], global_steps: int | None = None
    ) -> dict[str, float]:
        version = 0 if global_steps is None else global_steps
        data = self.gather(weights, version)
        if data is not None and self._board is not None:
            temporary = self._board.with_suffix(".part")
            temporary.touch(mode=0o600)
            temporary.write_bytes(data)
            os.replace(temporary, self._board)
        return {}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:  # type: ignore[override]
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
            if self._board.exists():
                return decode(self._board.read_bytes())
            await asyncio.sleep(POLL_S)
        raise WeightSyncError(f"the trainer published no weights within {self._timeout_s:g} s")

    def close(self) -> None:
        """Unlink the arenas. Called when the worker ends in order; a killed worker's tracker does the same."""
        if self._writer is not None:
            self._writer.close()
