# SPDX-License-Identifier: Apache-2.0
"""The `verl.plugins` entry point. verl runs it in every process that imports verl, so it is light.

Registers the CPU platform (used only when VERL_PLATFORM=cpu) and notes that it ran: verl hides the
error of a plugin that fails to load, so the trainer asks `is_loaded` at its start.
"""

from __future__ import annotations

import os

_loaded = False


def is_loaded() -> bool:
    """Did verl load this plugin in this process?"""
    return _loaded


def load() -> None:
    """Register what must be known before verl asks for its platform. Idempotent."""
    global _loaded
    from .cpu_platform import register

    register()
    if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
        # verl registers its FSDP engines for cuda and npu only; they run on CPU as they are.
        os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")
    _loaded = True


load()
