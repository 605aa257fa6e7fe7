# SPDX-License-Identifier: Apache-2.0
"""A `vllm.general_plugins` entry point: what vLLM's engine does otherwise, and why.

The engine core can load a version and say, between the same two steps, how far each request was. Only there
it is known which requests are still alive.

The rest is for CPU runs. The engine forks its worker instead of spawning it. The rollout server is a Ray actor,
from which vLLM only spawns; it then tells every process below to spawn too. The engine core is no Ray actor and has
imported all that its worker needs, so there vLLM's own default, fork, is safe, and saves the worker's 15 CPU-seconds
of imports.

Engine core and worker spin for milliseconds after a message, not for a second. That costs nothing where
cores are plenty; here every core that spins is missing to the trainer. They look again soon, because
the notification that should wake them is dropped when it follows another one too closely.

Loaded by vLLM in each of its processes, so it imports nothing that they do not.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
from typing import Any

SPIN_S = 0.005
"""A token takes about as long, so a busy engine still spins."""
LOOK_AGAIN_MS = 5
"""vLLM: 5000, which is what a lost notification costs."""


def register() -> None:
    """Called by vLLM before it builds an executor. Does nothing outside the engine core."""
    if not multiprocessing.current_process().name.startswith("EngineCore"):
        return
    from vllm.v1.engine.core import EngineCore

    EngineCore.load_snapshot = load_snapshot
    if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        _spin_briefly()


def load_snapshot(
    core: Any, manifest: bytes, piece_bytes: int, timeout_s: float
) -> tuple[list[dict[str, float]], dict[str, int]]:
    """A method of the engine core: each rank's report, and the output tokens that each live request had."""
    answers = core.collective_rpc("load_snapshot", timeout_s, (manifest, piece_bytes))
    progress = {name: request.num_output_tokens for name, request in core.scheduler.requests.items()}
    for _, in_batch in answers:
        progress |= {name: tokens for name, tokens in in_batch.items() if name in progress}
    return [report for report, _ in answers], progress


def _spin_briefly() -> None:
    from vllm.distributed.device_communicators import shm_broadcast

    # The forked worker inherits both.
    condition = shm_broadcast.SpinCondition
    condition.__init__ = functools.partialmethod(condition.__init__, busy_loop_s=SPIN_S)
    shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = LOOK_AGAIN_MS
