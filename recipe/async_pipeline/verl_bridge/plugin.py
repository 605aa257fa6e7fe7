# SPDX-License-Identifier: Apache-2.0
"""The `verl.plugins` entry point. verl loads it in every process that imports verl, so it must be light.

Registers the CPU platform (used only with VERL_PLATFORM=cpu) and records that it ran: verl swallows the
error of a plugin that fails to load, so the trainer checks `is_loaded` at startup.
"""

from __future__ import annotations

import os

_loaded = False


def is_loaded() -> bool:
    """Return whether verl loaded this plugin in this process."""
    return _loaded


def load() -> None:
    """Register the CPU platform before verl selects one. Idempotent."""
    global _loaded
    from .cpu_platform import register

    register()
    if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
        # verl registers its FSDP engines for cuda and npu only; they run on CPU as they are.
        os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")
        from .megatron_on_demand import postpone

        postpone()
    _loaded = True


load()
