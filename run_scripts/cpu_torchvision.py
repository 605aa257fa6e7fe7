# SPDX-License-Identifier: Apache-2.0
"""torchvision next to torch's CPU build. setup.sh copies this file into environments for CPUs.

The published wheels bring operators for CUDA, whose library does not load there. All that image processors
call (resize, crop, normalize) is Python over torch; but torchvision describes two operators to the compiler
when it is imported, which fails if no library has declared them. They are declared here, without a kernel.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

SCHEMAS = ("nms", "qnms")
_declared: list[Any] = []
"""The library of the declarations, which end with it."""


class AtImport(importlib.abc.MetaPathFinder):
    """Finds torchvision as Python does, with a loader that declares the operators first."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torchvision":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def declare_and_execute(module: ModuleType) -> None:
            declare(Path(str(spec.origin)).with_name("_C.so"))
            execute(module)

        # Not when the package is only looked for: declaring imports torch.
        vars(spec.loader)["exec_module"] = declare_and_execute
        return spec


def declare(library: Path) -> None:
    """Declare the operators, unless torchvision's own library does."""
    import torch

    try:
        torch.ops.load_library(library)
    except OSError:
        _declared.append(torch.library.Library("torchvision", "FRAGMENT"))
        for name in SCHEMAS:
            _declared[-1].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, AtImport())
