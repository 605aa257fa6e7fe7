# SPDX-License-Identifier: Apache-2.0
"""torchvision next to torch's CPU build. setup.sh copies this file into environments for CPUs.

The published wheels bring operators for CUDA, whose library does not load there. All that image processors
call (resize, crop, normalize) is Python over torch; but torchvision describes two operators to the compiler
when it is imported, which fails if no library has declared them. They are declared here, without a kernel.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder

SCHEMAS = ("nms", "qnms")
_declared: list[object] = []
"""The library of the declarations, which end with it."""


class AtImport:
    """Finds torchvision as Python does, with a loader that declares the operators first.

    Each process has one, so this module imports next to nothing.
    """

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name) if name == "torchvision" else None
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def declare_and_execute(module: object) -> None:
            declare(str(spec.origin).replace("__init__.py", "_C.so"))
            execute(module)  # type: ignore[arg-type]

        # Not when the package is only looked for: declaring imports torch.
        vars(spec.loader)["exec_module"] = declare_and_execute
        return spec


def declare(library: str) -> None:
    """Declare the operators, unless torchvision's own library does."""
    import torch

    try:
        torch.ops.load_library(library)
    except OSError:
        declared = torch.library.Library("torchvision", "FRAGMENT")
        for name in SCHEMAS:
            declared.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _declared.append(declared)


sys.meta_path.insert(0, AtImport())  # type: ignore[arg-type]
