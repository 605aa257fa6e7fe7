# SPDX-License-Identifier: Apache-2.0
"""CUDA calls of megatron-core and Megatron-Bridge on the CPU platform.

Three parts, each as narrow as its purpose allows:

- `cuda_means_cpu`: inside it, `device="cuda"` of a torch function means the CPU. The engine enters it in the
  methods that reach such literals.
- `cuda_type_names`: inside it, `Tensor.type()` gives the names of CUDA's tensor types, the only ones that
  megatron-core's optimizers accept.
- `install`: functions of `torch.cuda` that exist without CUDA but fail when called. `is_available()` stays
  False.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
_TENSOR_TYPE = torch.Tensor.type


def is_cuda(device: Any) -> bool:
    """Return whether an argument `device` of a torch function means a CUDA device."""
    if isinstance(device, bool):
        return False
    if isinstance(device, int):
        return True
    return str(device).partition(":")[0] == "cuda"


class _CudaMeansCpu(TorchFunctionMode):
    """Replace the keyword `device`, and no pinned memory. Positional devices stay, as nothing uses them."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") is not None and is_cuda(kwargs["device"]):
            kwargs = {**kwargs, "device": CPU}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)


def cuda_means_cpu() -> AbstractContextManager[Any]:
    """Return a context in which `device="cuda"` means the CPU; it changes nothing where CUDA works."""
    return nullcontext() if torch.cuda.is_available() else _CudaMeansCpu()


@contextmanager
def cuda_type_names() -> Iterator[None]:
    """Name the types of tensors as CUDA's: `torch.cuda.FloatTensor` for `torch.FloatTensor`."""

    def name_of(tensor: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None or args or kwargs:
            return _TENSOR_TYPE(tensor, dtype, *args, **kwargs)
        name = _TENSOR_TYPE(tensor)
        return name if ".cuda." in name else name.replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = name_of  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.Tensor.type = _TENSOR_TYPE  # type: ignore[method-assign]


class Stream:
    """A stream of a device that computes at once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> CpuEvent:
        return CpuEvent()

    def query(self) -> bool:
        return True


class CpuEvent:
    """An event that has happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _same(tensor_or_module: Any, *args: Any, **kwargs: Any) -> Any:
    return tensor_or_module


def _no_bytes(*args: Any, **kwargs: Any) -> int:
    return 0


REPLACED: dict[str, Any] = {
    "current_device": lambda: CPU,
    "synchronize": _nothing,
    "manual_seed": torch.manual_seed,
    "get_rng_state": lambda device=None: torch.get_rng_state(),
    "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
    "is_current_stream_capturing": lambda: False,
    "memory_allocated": _no_bytes,
    "max_memory_allocated": _no_bytes,
    "memory_reserved": _no_bytes,
    "Stream": Stream,
    "Event": CpuEvent,
    "current_stream": lambda *device: Stream(),
    "default_stream": lambda *device: Stream(),
    "stream": lambda stream: nullcontext(),
    "set_stream": _nothing,
}
"""The attributes of `torch.cuda` that `install` replaces."""


def install() -> bool:
    """Replace the calls that fail without CUDA, for this process. Idempotent.

    Returns False, and changes nothing, if CUDA works here.
    """
    if torch.cuda.is_available():
        return False
    for name, value in REPLACED.items():
        setattr(torch.cuda, name, value)
    torch.Tensor.cuda = _same  # type: ignore[assignment]
    torch.nn.Module.cuda = _same  # type: ignore[assignment]

    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    return True
