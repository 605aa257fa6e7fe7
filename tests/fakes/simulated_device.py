# SPDX-License-Identifier: Apache-2.0
"""CUDA devices that are not there: their memory is host memory which only kernels of a device may touch.

Tensors stay plain tensors with real values and addresses, so all code runs as it is. Two modes decide by
the storage where a tensor is, and `.device` and `.is_cuda` follow from it. An operation that mixes host and
device memory or the memories of two devices, and a read of device memory on the host without a copy, raise
an error as CUDA does. Where no index is given, the device is that of the thread's current stream, or the
first one. Each device has its own streams. Copies that do not block are made when their stream synchronizes
or runs its next operation, so a missing synchronization, or that of another device, leaves old bytes. CUDA
would run an operation on the default stream of its device where the current stream is another device's; here
that is an error.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from recipe.async_pipeline.weight_sync.memory import memory_work

DEVICE = torch.device("cuda", 0)
_aten = torch.ops.aten
_COPIES = {_aten.copy_.default, _aten._foreach_copy_.default}
_INDEXED = {
    _aten.index.Tensor,
    _aten.index_put.default,
    _aten.index_put_.default,
    _aten._index_put_impl_.default,
    _aten._unsafe_index.Tensor,
}
"""Operations on device memory whose indices may be in host memory."""
Pair = tuple[torch.Tensor, torch.Tensor]


class WrongMemory(RuntimeError):
    """A kernel got memory that it cannot use; PyTorch's own error for it is a RuntimeError too."""


class Stream:
    """A queue of copies to or from the memory of one device."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.pending: list[Pair] = []

    def synchronize(self) -> None:
        """Make the copies."""
        pending, self.pending = self.pending, []
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            for target, source in pending:
                target.copy_(source)


class SimulatedDevice:
    """The devices. `pinned` has the sizes of the host memory that was pinned for them, in bytes."""

    def __init__(self) -> None:
        self.active = True
        self.pinned: list[int] = []
        self.memory: dict[int, torch.UntypedStorage] = {}
        """The devices' storages. None is freed, so that no other memory gets its address."""
        self.indices: dict[int, int] = {}
        """Which device has a storage."""
        self.streams: list[Stream] = []
        """All but the default ones, which are by device."""
        self._defaults: dict[int, Stream] = {}
        self._current = threading.local()

    def adopt(self, tensors: Iterable[torch.Tensor], index: int = 0) -> None:
        """Move memory to a device, where it is."""
        for tensor in tensors:
            self.adopt_storage(tensor.untyped_storage(), index)

    def adopt_storage(self, storage: torch.UntypedStorage, index: int) -> None:
        self.memory[storage._cdata] = storage
        self.indices[storage._cdata] = index

    def index_of(self, tensor: torch.Tensor | float) -> int | None:
        """Return which device has a tensor, or None for one in host memory, or a number (of older torch)."""
        if not isinstance(tensor, torch.Tensor):
            return None
        return self.indices.get(tensor.untyped_storage()._cdata)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is in the device's memory."""
        return self.holds_storage(tensor.untyped_storage())

    def holds_storage(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self.memory

    def holds_address(self, address: int) -> bool:
        """Return whether an address is in the device's memory."""
        return any(0 <= address - one.data_ptr() < one.nbytes() for one in self.memory.values())

    def stream(self, device: Any = None) -> Stream:
        """Return the current stream of a device in this thread, by default that of the current device."""
        index = self.index_asked(device)
        used = self._used
        return used if used and used.index == index else self._defaults.setdefault(index, Stream(index))

    def stream_for(self, index: int) -> Stream:
        """Return the stream of an operation on a device. Raises WrongMemory in a stream of another one."""
        if self._used and self._used.index != index:
            raise WrongMemory(f"an operation on the device {index} ran in a stream of {self._used.index}")
        return self.stream(torch.device(DEVICE.type, index))

    def index_asked(self, device: Any) -> int:
        """Return the index of a device, without one that of the current device of this thread."""
        index = None if device is None else torch.device(device).index
        current = self._used.index if self._used else 0
        return current if index is None else index

    @property
    def _used(self) -> Stream | None:
        return getattr(self._current, "stream", None)

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        before, self._current.stream = self._used, stream
        try:
            yield
        finally:
            self._current.stream = before

    def all_streams(self) -> list[Stream]:
        """Return the streams of all devices."""
        return [*self.streams, *self._defaults.values()]

    def synchronize(self, device: Any = None) -> None:
        index = self.index_asked(device)
        for stream in self.all_streams():
            if stream.index == index:
                stream.synchronize()

    @contextmanager
    def modes(self) -> Iterator[None]:
        """Apply the rules to this thread."""
        with _Rules(self), _Properties(self):
            yield

    def copy(self, pairs: Iterable[Pair], *, blocks: bool) -> None:
        """Copy within a memory or between both."""
        for target, source in pairs:
            ends = [self.index_of(one) for one in (source, target)]
            index = next((one for one in ends if one is not None), None)
            stream = None if index is None else self.stream_for(index)
            if stream is not None and None in ends and not blocks:
                stream.pending.append((target, source))
                continue
            if stream is not None:
                stream.synchronize()
            target.copy_(source)


class _Rules(TorchDispatchMode):
    """Which operations may run, and where their results are."""

    def __init__(self, simulated: SimulatedDevice) -> None:
        super().__init__()
        self._simulated = simulated

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        simulated, kwargs = self._simulated, dict(kwargs or {})
        if not simulated.active:
            return func(*args, **kwargs)
        if func in _COPIES:
            blocks = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
            many = func is not _aten.copy_.default
            simulated.copy(zip(*args[:2], strict=True) if many else [args[:2]], blocks=blocks)
            return None if many else args[0]
        if func is _aten._to_copy.default:
            return self._moved(*args, **kwargs)
        tensors = list(_tensors_in((args, kwargs)))
        here = [tensor for tensor in tensors if simulated.holds(tensor)]
        asked = kwargs.get("device")
        if asked is not None:
            kwargs["device"] = torch.device("cpu")
        if here and not func.is_view:
            self._check(func, args, tensors)
            simulated.stream_for(simulated.indices[here[0].untyped_storage()._cdata]).synchronize()
        result = func(*args, **kwargs)
        index = simulated.index_of(here[0]) if here else _index(asked)
        if index is not None:
            simulated.adopt(_tensors_in(result), index)
        return result

    def _check(self, func: Any, args: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Raises WrongMemory if an operand is elsewhere; single numbers may be in host memory."""
        looked_at = [args[0], *_tensors_in(args[2:])] if func in _INDEXED else tensors
        for tensor in looked_at:
            if tensor.dim() and not self._simulated.holds(tensor):
                raise WrongMemory(
                    f"{func} runs on the device, but got a tensor of {tuple(tensor.shape)} in host memory"
                )
        indices = {str(self._simulated.index_of(one)) for one in tensors if self._simulated.holds(one)}
        if len(indices) > 1:
            raise WrongMemory(f"{func} got tensors of the devices {', '.join(sorted(indices))}")

    def _moved(self, tensor: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        simulated, asked = self._simulated, kwargs.pop("device", None)
        index = simulated.index_of(tensor) if asked is None else _index(asked)
        blocks = not kwargs.pop("non_blocking", False)
        moved = torch.empty_like(tensor, dtype=kwargs.get("dtype") or tensor.dtype)
        if index is not None:
            simulated.adopt([moved], index)
        simulated.copy([(moved, tensor)], blocks=blocks)
        return moved


class _Properties(TorchFunctionMode):
    """What tensors say of themselves, and calls that PyTorch answers before any operation runs."""

    def __init__(self, simulated: SimulatedDevice) -> None:
        super().__init__()
        self._simulated = simulated

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        simulated, kwargs = self._simulated, dict(kwargs or {})
        if not simulated.active:
            return func(*args, **kwargs)
        if getattr(func, "__name__", "") == "__get__" and simulated.holds(args[0]):
            said: Mapping[Any, Any] = {
                torch.Tensor.device: torch.device(DEVICE.type, simulated.index_of(args[0])),
                torch.Tensor.is_cuda: True,
                torch.Tensor.is_cpu: False,
            }
            if func.__self__ in said:
                return said[func.__self__]
        if func in (torch.Tensor.numpy, torch.Tensor.__array__) and simulated.holds(args[0]):
            raise TypeError("can't convert cuda:0 device type tensor to numpy; copy it to host memory first")
        if func in (torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda):
            return self._to(func, *args, **kwargs)
        index = _index(kwargs.get("device"))
        if index is None:
            return func(*args, **kwargs)
        made = func(*args, **kwargs | {"device": torch.device("cpu")})
        simulated.adopt(_tensors_in(made), index)
        return made

    def _to(self, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        simulated, copies = self._simulated, kwargs.pop("copy", False)
        if func is not torch.Tensor.to:
            args = (func.__name__, *args)
        if isinstance(args[0] if args else None, torch.Tensor):
            other = args[0]
            args = (_place(simulated.index_of(other)), other.dtype, *args[1:])
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        index = simulated.index_of(tensor) if device is None else _index(device)
        if index == simulated.index_of(tensor) and dtype in (None, tensor.dtype) and not copies:
            return tensor
        place = _place(index)
        return torch.ops.aten._to_copy.default(tensor, dtype=dtype, device=place, non_blocking=non_blocking)


def _index(asked: Any) -> int | None:
    """Return the index of a device, or None if it is the host's."""
    device = torch.device("cpu" if asked is None else asked)
    return (device.index or 0) if device.type == DEVICE.type else None


def _place(index: int | None) -> torch.device:
    return torch.device("cpu") if index is None else torch.device(DEVICE.type, index)


def _tensors_in(found: Any) -> Iterator[torch.Tensor]:
    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, (list, tuple)):
        for one in found:
            yield from _tensors_in(one)
    elif isinstance(found, dict):
        yield from _tensors_in(list(found.values()))


@contextmanager
def simulated_device() -> Iterator[SimulatedDevice]:
    """Let this process have a device, in all threads that start meanwhile."""
    simulated = SimulatedDevice()
    run, clone, move = threading.Thread.run, torch.UntypedStorage.clone, ctypes.memmove

    def run_with_rules(thread: threading.Thread) -> None:
        with simulated.modes() if simulated.active else nullcontext():
            run(thread)

    def cloned(storage: torch.UntypedStorage) -> torch.UntypedStorage:
        copied = clone(storage)
        if simulated.holds_storage(storage):
            simulated.adopt_storage(copied, simulated.indices[storage._cdata])
        return copied

    def moved(target: int, source: int, nbytes: int) -> None:
        for address in (target, source):
            if simulated.holds_address(address):
                raise WrongMemory("the host copied bytes from or to device memory")
        move(target, source, nbytes)

    class OwnStream(Stream):
        def __init__(self, device: Any = None) -> None:
            super().__init__(simulated.index_asked(device))
            simulated.streams.append(self)

    def register(address: int, nbytes: int, flags: int) -> int:
        simulated.pinned.append(nbytes)
        return 0

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=lambda address: 0)
    replaced = {
        "_lazy_init": lambda: None,
        "synchronize": simulated.synchronize,
        "current_stream": simulated.stream,
        "Stream": OwnStream,
        "stream": simulated.use,
        "cudart": lambda: runtime,
        "check_error": lambda code: None,
    }
    memory_work.threads_of.cache_clear()  # threads that started before do not know the rules
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a run; with more, PyTorch's own copy is used, which may mix memories
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(threading.Thread, "run", run_with_rules)
        patched.setattr(torch.UntypedStorage, "clone", cloned)
        patched.setattr(ctypes, "memmove", moved)
        for name, replacement in replaced.items():
            patched.setattr(torch.cuda, name, replacement)
        try:
            with simulated.modes():
                yield simulated
        finally:
            simulated.active = False
            memory_work.threads_of.cache_clear()
            torch.set_num_threads(threads)
