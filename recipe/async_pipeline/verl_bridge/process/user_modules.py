# SPDX-License-Identifier: Apache-2.0
"""Load Python files of users, such as reward functions and tools, as Python loads a script's neighbours.

verl executes such a file as a module that nothing else finds. Dataclasses with postponed annotations, pickle
and processes that the file spawns look their module up by name, and `import` finds no file of its folder.
This module imports neither verl nor ray: see `reward.executor`.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGE, FILE = "pkg://", "file://"


def module_of(file: Path) -> ModuleType:
    """Execute a Python file as the module that `import` of its stem yields in a script of the same folder.

    Its folder becomes the last one of `sys.path`, which spawned processes inherit. Idempotent. Raises what
    the file raises.
    """
    file = file.resolve()
    add_folder(file)
    name = _module_name(file)
    if name in sys.modules:
        return sys.modules[name]

    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def add_folder(file: Path) -> None:
    """Let `import` find the neighbours of a file, after everything else."""
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)


def _module_name(file: Path) -> str:
    """Return the file's stem, or a unique name if the stem belongs to another module."""
    if "." not in file.stem:
        with suppress(ValueError):  # __main__ has no spec
            other = importlib.util.find_spec(file.stem)
            if other is None or other.origin == str(file):
                return file.stem
    return f"user_module_{zlib.crc32(os.fsencode(file)):08x}"


def as_python_does(load_module: Callable[..., Any]) -> Callable[..., Any]:
    """Return `load_module` of verl, which loads files by `module_of`."""

    @wraps(load_module)
    def load(module_path: str, module_name: str | None = None) -> Any:
        file = Path((module_path or "").removeprefix(FILE))
        if module_name is not None or not file.is_file():
            return load_module(module_path, module_name)
        try:
            return module_of(file)
        except Exception as error:
            raise RuntimeError(f"{file} cannot be loaded: {type(error).__name__}: {error}") from error

    return load


def with_neighbours(load_tools: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return `load_function_tools_from_path` of verl, whose file may import its neighbours."""

    @wraps(load_tools)
    def load(path: str) -> Any:
        add_folder(Path(path))
        return load_tools(path)

    return load
