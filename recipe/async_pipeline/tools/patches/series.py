# SPDX-License-Identifier: Apache-2.0
"""The series of patches: the files of `patches/`, in order, each with its header and diffs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from recipe.async_pipeline.errors import PatchError
from recipe.async_pipeline.installed.verl import FILE, FileIds
from recipe.async_pipeline.tools.patches.unified_diff import FileDiff, parse_diffs
from recipe.async_pipeline.tools.patches.verl_source import read_pin

HEADER_FIELDS = ("Subject", "Why", "Without", "Origin", "Forwarded", "Remove-When", "Last-Update", "Test")
"""The fields that the header of every patch must have, in this order."""


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One patch file of the series."""

    name: str
    header: Mapping[str, str]
    head: bytes
    """Everything before the first diff, byte for byte."""
    files: tuple[FileDiff, ...]

    @property
    def without(self) -> tuple[str, ...]:
        """What a run lacks without this patch: the parts of the header field, between semicolons."""
        return tuple(part.strip() for part in self.header.get("Without", "").split(";") if part.strip())


@dataclass(frozen=True, kw_only=True)
class PatchSeries:
    """The patches of a folder, in order, linked by the blob ids that each leaves in the files it touches."""

    patches: tuple[Patch, ...]

    @property
    def chains(self) -> dict[str, tuple[tuple[str, FileDiff], ...]]:
        """The (patch name, diff) pairs of each touched path, in series order."""
        chains: dict[str, tuple[tuple[str, FileDiff], ...]] = {}
        for patch in self.patches:
            for diff in patch.files:
                chains[diff.path] = (*chains.get(diff.path, ()), (patch.name, diff))
        return chains

    @property
    def ids(self) -> dict[str, FileIds]:
        """The blob ids of each touched path, before and after the series."""
        return {path: FileIds(chain[0][1].old_id, chain[-1][1].new_id) for path, chain in self.chains.items()}

    def check(self) -> None:
        """Raise PatchError if a patch expects a file in a state that the patches before it do not leave."""
        for path, chain in self.chains.items():
            for (_, before), (name, after) in zip(chain, chain[1:], strict=False):
                if before.new_id != after.old_id:
                    raise PatchError(
                        f"{name} expects {path} at {after.old_id}, the series before it leaves "
                        f"{before.new_id}; edit the tree, then run `async-pipeline patch refresh {name}`"
                    )


def parse_header(text: str) -> dict[str, str]:
    """Read `Field: value` lines; a line that begins with a space continues the previous one."""
    fields: dict[str, str] = {}
    last = ""

    for line in text.splitlines():
        if line.startswith((" ", "\t")) and last:
            fields[last] += " " + line.strip()
        elif ":" in line:
            last, _, value = line.partition(":")
            fields[last] = value.strip()
    return fields


def load_series(folder: Path) -> PatchSeries:
    """Read and check the patches of `folder`, in the order of its `series` file.

    Raises PatchError if a listed patch is missing or unreadable, or the blob ids do not chain.
    """
    stamp = tuple(sorted((p.name, p.stat().st_mtime_ns) for p in folder.iterdir() if p.is_file()))
    return _load_series(folder, stamp)


@lru_cache(maxsize=8)
def _load_series(folder: Path, stamp: tuple[tuple[str, int], ...]) -> PatchSeries:
    """Load the series; `stamp` is part of the cache key, so that an edited patch is read again."""
    del stamp
    series = PatchSeries(patches=tuple(load_patch(folder / name) for name in series_names(folder)))
    series.check()
    return series


def series_names(folder: Path) -> tuple[str, ...]:
    """Return the patch names that `folder`'s `series` file lists; `#` begins a comment.

    Raises PatchError if the file is missing.
    """
    file = folder / "series"
    if not file.is_file():
        raise PatchError(f"{file} is missing; restore it from version control")
    lines = (line.partition("#")[0].strip() for line in file.read_text(encoding="utf-8").splitlines())
    return tuple(line for line in lines if line)


def load_patch(file: Path) -> Patch:
    """Read one patch file. Raises PatchError if it is missing or unreadable."""
    if not file.is_file():
        raise PatchError(f"{file} is in the series but missing; restore it from version control")
    text = file.read_bytes()
    head = text.partition(b"diff --git ")[0]
    files = parse_diffs(text[len(head) :], source=file.name)
    return Patch(name=file.name, header=parse_header(head.decode()), head=head, files=files)


def recorded_ids(folder: Path) -> str:
    """Return the contents of `state.json` in `folder`: the ids of its series, and of the ones below it."""
    folders = [folder, *sorted(pin.parent for pin in folder.glob("*/PIN"))]
    versions = {
        read_pin(one).version: {path: ids._asdict() for path, ids in load_series(one).ids.items()}
        for one in folders
    }
    return json.dumps(versions, indent=1) + "\n"


def record_ids(folder: Path) -> None:
    """Write `state.json`, which runs compare their verl with."""
    (folder / FILE).write_text(recorded_ids(folder), encoding="utf-8")
