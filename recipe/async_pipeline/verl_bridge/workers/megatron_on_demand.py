# SPDX-License-Identifier: Apache-2.0
"""verl's Megatron engine on the CPU platform, imported only by the processes that train with it.

verl imports every installed training engine in every process that uses one of them, and Megatron's import
takes longer than that of all the others. On the CPU platform this module takes the place of
`verl.workers.engine.megatron`: it registers engines that import Megatron, and repair it for the CPU, when
they are made.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGE = "verl.workers.engine.megatron"


def postpone() -> None:
    """Put the light package in the place of verl's, for imports to come. Idempotent.

    Does nothing if megatron-core or verl is not installed.
    """
    verl = find_spec("verl")
    if PACKAGE in sys.modules or verl is None or verl.origin is None or find_spec("megatron") is None:
        return
    module = _LightPackage(PACKAGE)
    module.__path__ = [str(Path(verl.origin).parent / "workers" / "engine" / "megatron")]
    sys.modules[PACKAGE] = module


class _LightPackage(ModuleType):
    """verl's package without its `__init__`; its submodules are verl's."""

    def __getattr__(self, name: str) -> Any:
        if name in ("MegatronEngine", "MegatronEngineWithLMHead", "MegatronEngineWithValueHead"):
            return _register()[name]
        raise AttributeError(f"{self.__name__} has no {name} on the CPU platform")


_engines: dict[str, Any] = {}


def _register() -> dict[str, Any]:
    """Register the engines with verl, once; return them by the names of verl's."""
    if _engines:
        return _engines
    from verl.workers.engine.base import BaseEngine, EngineRegistry

    def postponed(index: int) -> type[Any]:
        class Postponed(BaseEngine):
            """Becomes the real engine when it is made."""

            def __new__(cls, *args: Any, **kwargs: Any) -> Any:
                return cpu_engines()[index](*args, **kwargs)

        return Postponed

    language, value = postponed(0), postponed(1)
    # verl looks for the vendor of the platform first; see `cpu_platform.PlatformCPU.vendor_name`.
    EngineRegistry.register("language_model", "megatron", device="cuda", vendor="cpu")(language)
    EngineRegistry.register("value_model", "megatron", device="cuda", vendor="cpu")(value)
    _engines.update(
        MegatronEngine=language, MegatronEngineWithLMHead=language, MegatronEngineWithValueHead=value
    )
    return _engines


def cpu_engines() -> tuple[type[Any], type[Any]]:
    """Import Megatron and return the engines with an LM head and with a value head. Idempotent.

    The order of these imports repairs Megatron for the CPU. Raises ImportError if megatron-core or
    megatron-bridge is not installed.
    """
    from .megatron import standin

    standin.import_bridge()

    from .megatron import cuda_shim
    from .megatron.standin import fill_all

    cuda_shim.install()
    fill_all()

    from .megatron.engine import CpuMegatronEngine, CpuMegatronValueEngine

    return CpuMegatronEngine, CpuMegatronValueEngine
