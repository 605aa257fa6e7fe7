# SPDX-License-Identifier: Apache-2.0
"""The order in which a process of the CPU platform imports Megatron, and repairs it."""

from __future__ import annotations

from typing import Any


def cpu_engines() -> tuple[type[Any], type[Any]]:
    """Import Megatron and return the engines with an LM head and with a value head. Idempotent.

    Raises ImportError if megatron-core or megatron-bridge is not installed.
    """
    from . import standin

    standin.import_bridge()

    from . import cuda_shim, holes

    cuda_shim.install()
    holes.fill_all()

    from .engine import CpuMegatronEngine, CpuMegatronValueEngine

    return CpuMegatronEngine, CpuMegatronValueEngine
