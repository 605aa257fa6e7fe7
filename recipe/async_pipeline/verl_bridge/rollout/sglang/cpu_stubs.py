# SPDX-License-Identifier: Apache-2.0
"""What SGLang needs to be imported and run on torch's CPU build.

SGLang imports two packages on every device: sgl_kernel, which exists for GPUs only, and IPython, of which it
uses two names. Names are enough: models on a CPU call none of them. Only the CPU platform installs the
stubs, and each has a test that fails when SGLang no longer needs it.

`on_import` must run in each process before SGLang is imported.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import inspect
import os
import sys
from types import ModuleType
from typing import Any

from ... import replaced


class _Named(type):
    """A class whose attributes are their own names, as class bodies read members of enumerations."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


def _absent(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("not available on a CPU; only its name exists, so that SGLang can be imported")


def _any_name(name: str) -> Any:
    """Return a class for a capitalized name, else a function that raises RuntimeError."""
    if name.startswith("__"):
        raise AttributeError(name)
    return _Named(name, (), {}) if name[:1].isupper() else _absent


def _add(name: str, **attributes: Any) -> None:
    """Add a module; it has every name if no attributes are given."""
    module = ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    module.__dict__.update(attributes or {"__getattr__": _any_name})
    sys.modules[name] = module
    parent, _, leaf = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], leaf, module)


def _kernel_for_cpus(name: str) -> Any:
    """Return a kernel that newer releases import by name on a CPU. Only speculative decoding calls them.

    The absence of all other names makes SGLang compute with torch's functions.
    """
    if not name.endswith("_cpu"):
        raise AttributeError(name)
    return _absent


def sgl_kernel() -> None:
    """SGLang's CUDA kernels; the host's part of the KV cache imports two names."""
    _add("sgl_kernel", __getattr__=_kernel_for_cpus)
    _add("sgl_kernel.kvcacheio")


def ipython() -> None:
    """Output in notebooks. Other packages ask a loaded IPython for its version and its shell."""
    _add("IPython", version_info=(0, 0), get_ipython=lambda: None)
    _add("IPython.display", HTML=_absent, display=_absent)


def tensors_between_processes() -> None:
    """SGLang patches how torch sends tensors, for CUDA tensors only, unless that was done before.

    torch's default way sends file descriptors with a key that only a parent and its children share.
    """
    import torch.multiprocessing
    from torch.multiprocessing import reductions

    torch.multiprocessing.set_sharing_strategy("file_system")
    reductions._reduce_tensor_original = reductions.reduce_tensor
    reductions._rebuild_cuda_tensor_original = reductions.rebuild_cuda_tensor


DUMPER = "sglang.srt.debug_utils.dumper"


def megatron() -> None:
    """SGLang's dumper of tensors asks an installed Megatron for its ranks, which no rollout process has. The
    import would take each process of a replica four CPU seconds.
    """
    sys.meta_path.insert(0, _DumperWithoutMegatron())


class _DumperWithoutMegatron(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != DUMPER or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None or "megatron.core" in sys.modules:
            return spec
        execute = spec.loader.exec_module

        def without_megatron(module: ModuleType) -> None:
            # Python's way to have an import fail.
            sys.modules["megatron.core"] = None  # type: ignore[assignment]
            try:
                execute(module)
            finally:
                del sys.modules["megatron.core"]

        spec.loader.exec_module = without_megatron  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Install all stubs."""
    # Per process: verl deletes it from the environment again.
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    for stub in (megatron, sgl_kernel, ipython, tensors_between_processes):
        stub()


class _WithoutPinning(ModuleType):
    """`torch`, whose functions ignore that memory is to be pinned."""

    def __getattr__(self, name: str) -> Any:
        import torch

        return getattr(torch, name)

    @staticmethod
    def tensor(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        import torch

        return torch.tensor(*args, **kwargs)

    @staticmethod
    def zeros(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        import torch

        return torch.zeros(*args, **kwargs)


WITHOUT_PINNING = _WithoutPinning("torch")


def without_pinning() -> None:
    """Have tensors not be pinned, which torch's CPU build cannot. For the process that computes."""
    import torch

    replaced.apply("SGLang's scheduler on a CPU")
    torch.Tensor.pin_memory = lambda tensor, *args, **kwargs: tensor  # type: ignore[method-assign]


def apply_mask(grammar: Any, logits: Any, vocab_mask: Any) -> None:
    """Exclude the tokens that a grammar does not permit, as XGrammar does on a CPU."""
    from xgrammar import apply_token_bitmask_inplace

    apply_token_bitmask_inplace(logits, vocab_mask)


def angles_by_length() -> None:
    """Let transformers' rotary embedding of Qwen2.5-VL's vision tower take a length, too.

    SGLang gives it one up to 0.5.18, as the release of transformers took that SGLang 0.5.12 is made for. The
    release that vLLM needs takes positions.
    """
    import torch
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl

    embedding = modeling_qwen2_5_vl.Qwen2_5_VisionRotaryEmbedding
    stock = embedding.forward
    if "position_ids" not in inspect.signature(stock).parameters:
        return

    def forward(self: Any, position_ids: Any) -> Any:
        # SGLang reads the length from a tensor.
        is_length = not isinstance(position_ids, torch.Tensor) or position_ids.dim() == 0
        return stock(self, torch.arange(int(position_ids)) if is_length else position_ids)

    embedding.forward = forward


class _AtFirstImport(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "sglang" and self in sys.meta_path:
            sys.meta_path.remove(self)
            install()


def on_import() -> None:
    """Install the stubs when this process imports SGLang, if it ever does. Idempotent."""
    if (
        not any(isinstance(finder, _AtFirstImport) for finder in sys.meta_path)
        and "sglang" not in sys.modules
    ):
        sys.meta_path.insert(0, _AtFirstImport())
