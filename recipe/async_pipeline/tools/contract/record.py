# SPDX-License-Identifier: Apache-2.0
"""The contract: the shape in the pinned verl of everything that this package uses.

`python -m recipe.async_pipeline.tools.contract.record` writes `patches/contract.json` from the code and from
the pinned tree, `patches/engines.json` from the installed engines, and `patches/state.json` from the patches.
Nothing in them is kept by hand.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from recipe.async_pipeline.errors import ContractError
from recipe.async_pipeline.installed.engines import ENGINES, installed
from recipe.async_pipeline.installed.engines import FILE as ENGINES_FILE
from recipe.async_pipeline.installed.verl import has, keys_of_tree, patches_dir
from recipe.async_pipeline.tools.patches import series, verl_source

from . import config_keys, engines, trees
from .shapes import shape_of
from .sources import Sources
from .uses import Use, own_of, subclasses, uses_of

FILE = "contract.json"


@dataclass(frozen=True, kw_only=True)
class Contract:
    """What one version of verl has of the things that this package uses."""

    verl: str
    shapes: Mapping[str, str]
    """By place: `class`, `module`, `value`, `property`, or a signature."""
    users: Mapping[str, tuple[str, ...]]
    """By place: the files of this package that use it, and how."""
    unimplemented: Mapping[str, tuple[str, ...]]
    """By class of this package: abstract methods of verl that it leaves to others."""
    keys: Mapping[str, tuple[str, ...]]
    """By file of verl's composed configurations: the keys in it that this package names."""


def derive(
    sources: Sources, uses: Iterable[Use], keys: Mapping[str, Mapping[str, Any]], version: str
) -> Contract:
    """Return the contract of this package with the tree of `sources`, whose configurations are `keys`."""
    files: dict[str, dict[str, set[str]]] = {}
    for use in uses:
        files.setdefault(use.place, {}).setdefault(use.where.partition(":")[0], set()).add(use.how)
    users = {
        place: tuple(sorted(f"{file} ({', '.join(sorted(how))})" for file, how in found.items()))
        for place, found in files.items()
    }
    shapes = {place: shape_of(sources, place) for place in sorted(users)}
    named = {path for path, _ in config_keys.named_keys(sources)}
    return Contract(
        verl=version,
        shapes={place: shape for place, shape in shapes.items() if shape is not None},
        users={place: users[place] for place, shape in shapes.items() if shape is not None},
        unimplemented=unimplemented(sources),
        keys={file: tuple(sorted(path for path in named if has(tree, path))) for file, tree in keys.items()},
    )


def unimplemented(sources: Sources) -> dict[str, tuple[str, ...]]:
    """Return for each subclass of verl's classes the abstract methods that nothing implements."""
    result = {}
    for subclass in subclasses(sources):
        own = {owner.place for owner in own_of(sources, subclass.found)}
        members = sources.members(subclass.found)
        left = sorted(name for name, m in members.items() if m.abstract and m.owner.place not in own)
        if left:
            result[subclass.found.place] = tuple(left)
    return result


def of_tree(root: Path, folder: Path) -> Contract:
    """Return the contract with the tree at `root`, as the series of `folder` patches it."""
    contents, _ = trees.patched(root, series.load_series(folder))
    sources = trees.sources_of(root, contents)
    return derive(sources, uses_of(sources), keys_of_tree(root), verl_source.version_of(root))


def as_text(contract: Contract) -> str:
    """Return the contents of the file."""
    return json.dumps(asdict(contract), indent=1) + "\n"


def load(folder: Path) -> Contract:
    """Read `folder/contract.json`. Raises ContractError if it is missing or not a contract."""
    file = folder / FILE
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        return Contract(
            verl=raw["verl"],
            shapes=raw["shapes"],
            users={place: tuple(users) for place, users in raw["users"].items()},
            unimplemented={name: tuple(left) for name, left in raw["unimplemented"].items()},
            keys={file: tuple(paths) for file, paths in raw["keys"].items()},
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ContractError(
            f"{file} is not a contract ({type(error).__name__}: {error}); reinstall async_pipeline, or run "
            "`python -m recipe.async_pipeline.tools.contract.record` in a checkout"
        ) from None


def of_all_engines(
    recorded: Mapping[str, engines.EngineContract], folder: Path
) -> list[engines.EngineContract]:
    """Return the contracts of installed engines, and from `folder/engines.json` the ones of the others.

    The file is read only if an engine is not installed: a merge may have left it in conflict.

    Raises ContractError if the file must be read and is not a contract.
    """
    is_needed = (folder / ENGINES_FILE).is_file() and not recorded.keys() >= set(ENGINES)
    known = engines.load(folder) if is_needed else {}
    return list({**known, **recorded}.values())


def main() -> None:
    """Write the contract with the pinned tree, or with the one of another pin, and with the engines."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--verl-dir", type=Path, metavar="DIR", help="the folder that contains verl/")
    given: Path | None = parser.parse_args().verl_dir
    root = given or verl_source.default_verl_root(patches_dir())
    folder = verl_source.series_folder(root)
    verl_source.check_version(root, verl_source.read_pin(folder))
    (folder / FILE).write_text(as_text(of_tree(root, folder)), encoding="utf-8")
    series.record_ids(patches_dir())
    found = {engine.name: engines.record(engine) for engine in installed()}
    file = patches_dir() / ENGINES_FILE
    file.write_text(engines.as_text(of_all_engines(found, file.parent)), encoding="utf-8")


if __name__ == "__main__":
    main()
