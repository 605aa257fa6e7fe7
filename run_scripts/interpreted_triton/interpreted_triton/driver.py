# SPDX-License-Identifier: Apache-2.0
"""The driver of no device, and what the interpreter lacks for vLLM."""

from types import ModuleType
from typing import Any

from triton.backends.driver import DriverBase

from recipe.async_pipeline.verl_bridge.cpu import cpu_overrides
from recipe.async_pipeline.verl_bridge.process.after_import import after_import


class Driver(DriverBase):
    """Drives no device; the interpreter reads and writes host memory."""

    @staticmethod
    def is_active() -> bool:
        return False


Driver.__abstractmethods__ = frozenset()


def interpret_log1p(libdevice: ModuleType) -> None:
    """Replace the one function of the device library that vLLM's sampler calls."""
    import triton.language as tl

    def log1p(x: Any) -> Any:
        return tl.log(1.0 + x.to(tl.float64)).to(tl.float32)

    vars(libdevice)["log1p"] = log1p


# vLLM looks for `cpu` in the version of the distribution `vllm` after it has looked for backends.
cpu_overrides.install()
after_import("triton.language.extra.libdevice", interpret_log1p)
