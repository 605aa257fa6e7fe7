# SPDX-License-Identifier: Apache-2.0
"""verl on CPU: the device abstraction that the FSDP engines and worker groups use.

Selected only by VERL_PLATFORM=cpu, never by detection: the head node of a GPU cluster may have no GPU.
Devices are logical (the user sets Ray's `num_gpus`); each is one process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


class _CpuDevice(ModuleType):
    """`torch.cpu`, plus the calls that verl makes on every device module and that have no effect on CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    @staticmethod
    def get_device_name(device: Any = None) -> str:
        return "cpu"

    @staticmethod
    def memory_allocated(device: Any = None) -> int:
        return 0

    max_memory_allocated = memory_reserved = max_memory_reserved = memory_allocated

    @staticmethod
    def mem_get_info(device: Any = None) -> tuple[int, int]:
        """Return free and total bytes of host memory."""
        page = os.sysconf("SC_PAGE_SIZE")
        return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")

    @staticmethod
    def get_rng_state(device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    @staticmethod
    def manual_seed(seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    @staticmethod
    def empty_cache() -> None:
        return None

    ipc_collect = reset_peak_memory_stats = empty_cache

    @staticmethod
    def set_device(device: Any) -> None:
        return None

    @staticmethod
    def synchronize(device: Any = None) -> None:
        return None


class PlatformCPU(PlatformBase):
    """Every device is the host; collectives are gloo; weights travel over shared memory."""

    def __init__(self) -> None:
        self._module = _CpuDevice("verl_cpu_device")

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> ModuleType:
        return self._module

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Return False: detection must not prefer the CPU of a node whose GPUs it cannot see."""
        return False

    def current_device(self) -> Any:
        """Return the device as a string: verl passes it to `tensor.to`, which reads 0 as an accelerator."""
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        return None

    def synchronize(self, device_index: int | None = None) -> None:
        return None

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        return None

    def empty_cache(self) -> None:
        return None

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        return None

    def profiler_stop(self) -> None:
        return None

    def ray_resource_name(self) -> str:
        """Return Ray's accelerator resource: logical devices are counted as GPUs."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


def register() -> None:
    """Register the platform with verl under the name `cpu`. Idempotent."""
    if PlatformRegistry.get("cpu") is None:
        PlatformRegistry.register("cpu")(PlatformCPU)


def is_cpu() -> bool:
    """Return whether this process runs on the CPU platform."""
    return os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu" and "torch" in sys.modules
