# SPDX-License-Identifier: Apache-2.0
"""The `verl.plugins` entry point. verl loads it in every process that imports verl, so it must be light.

VERL_USE_EXTERNAL_MODULES may name it too, if VERL_USE_EXTERNAL_PLUGINS disables entry points. It registers

- a `run_ppo` of verl that other entry points than main_ppo call, whose command lines it rewrites;
- a loader of files of users, such as reward functions, that loads them as Python does;
- the trainer `async_pipeline`, for `trainer.v1.trainer_mode=async_pipeline` without our patches;
- the CPU platform, and what verl lacks there (used only with VERL_PLATFORM=cpu).

It records that it ran, for the check of the trainer at startup: see `process.after_import`.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import cast

from .process.after_import import set_loaded


def load() -> None:
    """Register the CPU platform before verl selects one, and the trainer when verl can. Idempotent."""
    from . import replaced
    from .cpu.cpu_platform import register
    from .process.after_import import after_import

    register()
    replaced.apply_on_import("entry points")
    replaced.apply_on_import("files of users")
    after_import("verl.trainer.ppo.v1.trainer_base", register_trainer)
    if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
        # verl registers its FSDP engines for cuda and npu only; they run on CPU as they are.
        os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")
        from .cpu.cpu_overrides import install
        from .workers.megatron_on_demand import postpone

        install()
        postpone()
        # For Ascend devices. It imports vLLM, and so the compilers of torch, in every process of verl.
        sys.modules.setdefault("verl.checkpoint_engine.hccl_checkpoint_engine", cast(ModuleType, None))
    set_loaded()
    if any("async_pipeline" in word for word in sys.argv):
        from .hooks import rewrite_on_import

        # Before hydra composes the configuration: an entry point imports verl first. The checks of a command
        # line need a plug-in that has loaded.
        rewrite_on_import()


def register_trainer(trainer_base: ModuleType) -> None:
    """Register the trainer that `trainer.v1.trainer_mode=async_pipeline` names."""
    from .trainer import entry

    entry.register()


load()
