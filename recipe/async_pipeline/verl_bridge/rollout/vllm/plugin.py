# SPDX-License-Identifier: Apache-2.0
"""A `vllm.general_plugins` entry point: what vLLM's engine does otherwise, and why.

The engine core can load a version and say, between the same two steps, how far each request was. Only there
it is known which requests are still alive.

Loaded by vLLM in each of its processes, so it imports nothing that they do not.
"""

from __future__ import annotations

import multiprocessing
from typing import Any

IN_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""The engine core as its own worker. By its class: on a CPU vLLM takes `uni` for `mp`, since the threads of a
process
are set at its start. Those of a run are (run_scripts/cpu_env.sh), and a second process costs both cores
and time."""


def register() -> None:
    """Called by vLLM before it builds an executor. Does nothing outside the engine core."""
    if not multiprocessing.current_process().name.startswith("EngineCore"):
        return
    from vllm.v1.engine.core import EngineCore

    EngineCore.load_snapshot = load_snapshot


def load_snapshot(
    core: Any, manifest: bytes, piece_bytes: int, timeout_s: float
) -> tuple[list[dict[str, float]], dict[str, int]]:
    """A method of the engine core: each rank's report, and the output tokens that each live request had."""
    answers = core.collective_rpc("load_snapshot", timeout_s, (manifest, piece_bytes))
    progress = {name: request.num_output_tokens for name, request in core.scheduler.requests.items()}
    for _, in_batch in answers:
        progress |= {name: tokens for name, tokens in in_batch.items() if name in progress}
    return [report for report, _ in answers], progress
