# SPDX-License-Identifier: Apache-2.0
"""A `vllm.general_plugins` entry point: on CPU, the engine forks its worker instead of spawning it.

The rollout server is a Ray actor, from which vLLM only spawns; it then tells every process below to
spawn too. The engine core is no Ray actor and has imported all that its worker needs, so there vLLM's
own default, fork, is safe, and saves the worker's 15 CPU-seconds of imports. Loaded by vLLM in each of
its processes, so it imports nothing.
"""

from __future__ import annotations

import multiprocessing
import os


def register() -> None:
    """Called by vLLM before it builds an executor. Does nothing outside the engine core of a CPU run."""
    on_cpu = os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu"
    if on_cpu and multiprocessing.current_process().name.startswith("EngineCore"):
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
