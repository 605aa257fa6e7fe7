# SPDX-License-Identifier: Apache-2.0
"""SGLang's arguments on a CPU."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

CPU_ARGUMENTS: Mapping[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "lora_backend": "torch_native",
    # Its package is for CUDA only.
    "enable_memory_saver": False,
    # A step on a CPU leaves no time to overlap.
    "disable_overlap_schedule": True,
    # Otherwise an idle scheduler occupies a core.
    "sleep_on_idle": True,
}


CORES = "SGLANG_CPU_OMP_THREADS_BIND"
"""Environment variable of SGLang: the cores of each rank."""


def all_cores(ranks: int) -> str:
    """Return the value of `CORES` with which all ranks share the cores of this process.

    Without it SGLang gives each rank one NUMA node, and does not start if there are too few.
    """
    return "|".join([",".join(map(str, sorted(os.sched_getaffinity(0))))] * ranks)


DUE_FIRST = {
    "enable_priority_scheduling": True,
    "schedule_low_priority_values_first": True,
    "default_priority_value": 0,
    "disable_priority_preemption": True,
}
"""Requests wait in the order of their steps. What is running is not stopped for one that is due before it."""
SLOTS = 2
"""Adapters that SGLang's pool has room for: the served one, and none, which SGLang counts as one."""


def run_arguments(
    configured: Mapping[str, Any], requests: int, tokens: int, *, on_cpu: bool
) -> dict[str, Any]:
    """Return the configured arguments, and the ones that a run gives to SGLang besides verl's.

    `requests` and `tokens` as for `cpu_arguments`.
    """
    # SGLang refuses them with most policies.
    order = {} if {"schedule_policy", *DUE_FIRST} & configured.keys() else DUE_FIRST
    arguments = {"max_loras_per_batch": SLOTS, **order, **configured}
    return cpu_arguments(arguments, requests, tokens) if on_cpu else arguments


def cpu_arguments(configured: Mapping[str, Any], requests: int, tokens: int) -> dict[str, Any]:
    """Return the configured arguments, and the ones that a CPU needs if they are not configured.

    The KV cache has room for as many `requests` of as many `tokens` as may be open: by default SGLang takes a
    share of the machine's memory.
    """
    return {**CPU_ARGUMENTS, "max_total_tokens": requests * tokens, **configured}
