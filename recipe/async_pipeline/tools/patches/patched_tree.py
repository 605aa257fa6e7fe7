# SPDX-License-Identifier: Apache-2.0
"""The state of a verl tree relative to the series, and how to change it.

Each touched file is *pristine* (as published), *applied* (as the series leaves it) or *diverged* (neither),
judged by its git blob id alone. A change first computes and checks every resulting
file, writes all of them to a staging folder on the same disk, and only then swaps them in one by one.

A patched tree holds a copy of the series that was applied, in `.async_pipeline_patches/`. With it, a tree
that an older series patched is updated instead of being reported as diverged.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from recipe.async_pipeline.errors import PatchError
from recipe.async_pipeline.installed.verl import State, blob_id, read_or_none
from recipe.async_pipeline.tools.patches.series import PatchSeries, load_series, series_names
from recipe.async_pipeline.tools.patches.verl_source import series_folder

RECORD = ".async_pipeline_patches"
"""Folder in a patched tree that holds the series it was patched with."""


@dataclass(frozen=True, kw_only=True)
class FileState:
    """State of one touched file."""

    path: str
    state: State
    patches: tuple[str, ...]
    """Names of the patches that touch the file, in series order."""


@dataclass(frozen=True, kw_only=True)
class PatchState:
    """State of a tree relative to the series."""

    verl_root: Path
    files: tuple[FileState, ...]

    @property
    def overall(self) -> State:
        """`applied` or `pristine` if every file is, else `diverged`; an empty series counts as applied."""
        states = {file.state for file in self.files} or {"applied"}
        return states.pop() if len(states) == 1 else "diverged"

    @property
    def diverged(self) -> tuple[FileState, ...]:
        """The files that are neither pristine nor applied."""
        return tuple(file for file in self.files if file.state == "diverged")


def patch_state(verl_root: Path, *, folder: Path | None = None) -> PatchState:
    """Classify every touched file of the tree at `verl_root`; reads only those files (milliseconds).

    Raises PatchError if the series itself is unreadable.
    """
    return _state_against(load_series(folder or series_folder(verl_root)), verl_root)


def _state_against(series: PatchSeries, verl_root: Path) -> PatchState:
    return _state_of({path: read_or_none(verl_root / path) for path in series.chains}, series, verl_root)


def apply(verl_root: Path, *, folder: Path | None = None) -> tuple[str, ...]:
    """Bring the tree to *applied*; return the paths that changed.

    A tree that an older series patched is first reverted with the copy of that series in the tree. Raises
    PatchError naming every diverged file; nothing was changed then.
    """
    folder = folder or series_folder(verl_root)
    series = load_series(folder)

    current = {path: read_or_none(verl_root / path) for path in series.chains}
    undone = _undo_recorded(verl_root, series)
    state = _state_of({**current, **undone}, series, verl_root)
    _refuse_diverged(state, "patch")

    wanted: dict[str, bytes | None] = dict(undone)
    for path, chain in series.chains.items():
        content = wanted.get(path, current.get(path))
        if blob_id(content or b"") != chain[-1][1].new_id:
            for _, diff in chain:
                content = diff.apply(content or b"")
        wanted[path] = content

    changed = _swap(verl_root, wanted)
    _write_record(verl_root, folder)
    return changed


def revert(verl_root: Path, *, folder: Path | None = None) -> tuple[str, ...]:
    """Bring the tree back to *pristine*, byte for byte; return the paths that changed.

    Raises PatchError naming every diverged file; nothing was changed then.
    """
    series = load_series(folder or series_folder(verl_root))
    undone = _undo_recorded(verl_root, series)
    contents = {**{path: read_or_none(verl_root / path) for path in series.chains}, **undone}

    _refuse_diverged(_state_of(contents, series, verl_root), "revert")
    wanted = {**undone, **_reverted(series, contents)}
    changed = _swap(verl_root, wanted)
    shutil.rmtree(verl_root / RECORD, ignore_errors=True)
    return changed


def _undo_recorded(verl_root: Path, series: PatchSeries) -> dict[str, bytes | None]:
    """Return the contents that revert the recorded series.

    Empty if it is the current series, or if the tree is not exactly as the recorded series left it.
    """
    record = verl_root / RECORD
    if not (record / "series").is_file():
        return {}
    recorded = load_series(record)
    if recorded == series or _state_against(recorded, verl_root).overall != "applied":
        return {}
    return _reverted(recorded, {path: read_or_none(verl_root / path) for path in recorded.chains})


def _reverted(series: PatchSeries, contents: Mapping[str, bytes | None]) -> dict[str, bytes | None]:
    """Return the contents of the series' files with its patches reverted; None for a file that it created."""
    result: dict[str, bytes | None] = {}
    for path, chain in series.chains.items():
        content = contents[path]
        if content is not None and blob_id(content) != chain[0][1].old_id:
            for _, diff in reversed(chain):
                content = diff.revert(content or b"")
            content = None if chain[0][1].creates else content
        result[path] = content
    return result


def _state_of(contents: Mapping[str, bytes | None], series: PatchSeries, verl_root: Path) -> PatchState:
    chains, ids = series.chains, series.ids
    files = (
        FileState(
            path=path, state=ids[path].state_of(contents[path]), patches=tuple(name for name, _ in chain)
        )
        for path, chain in chains.items()
    )
    return PatchState(verl_root=verl_root, files=tuple(files))


def _refuse_diverged(state: PatchState, action: str) -> None:
    if not state.diverged:
        return
    named = ", ".join(f"{file.path} ({', '.join(file.patches)})" for file in state.diverged)
    raise PatchError(
        f"cannot {action} {state.verl_root}: diverged, neither as published nor as patched: {named}; "
        "nothing was changed. Keep your edit with `async-pipeline patch refresh PATCH`, or discard it with "
        "`async-pipeline patch fetch --fresh` (in a git clone: `git checkout` of the file)"
    )


def _swap(verl_root: Path, wanted: Mapping[str, bytes | None]) -> tuple[str, ...]:
    """Replace the tree's files by the contents in `wanted` (None: delete); return the paths that changed."""
    changes = {path: content for path, content in wanted.items() if read_or_none(verl_root / path) != content}
    with tempfile.TemporaryDirectory(prefix=".staging-", dir=verl_root) as staging:
        staged = {path: Path(staging) / str(i) for i, path in enumerate(changes)}
        for path, content in changes.items():
            if content is not None:
                _stage(staged[path], content, like=verl_root / path)

        for path, content in changes.items():
            if content is None:
                (verl_root / path).unlink()
            else:
                os.replace(staged[path], verl_root / path)
    return tuple(sorted(changes))


def _stage(file: Path, content: bytes, *, like: Path) -> None:
    file.write_bytes(content)
    # Keep the mode of the replaced file: files in a TemporaryDirectory are private, the tree's are not.
    shutil.copymode(like if like.exists() else like.parent / "__init__.py", file)


def _write_record(verl_root: Path, folder: Path) -> None:
    """Copy the applied series into the tree, hidden from the git of a user's clone."""
    record = verl_root / RECORD
    names = ("series", *series_names(folder))
    if record.is_dir() and all(read_or_none(record / name) == read_or_none(folder / name) for name in names):
        return

    fresh = Path(tempfile.mkdtemp(prefix=".staging-", dir=verl_root))
    for name in names:
        shutil.copyfile(folder / name, fresh / name)
    (fresh / ".gitignore").write_text("*\n", encoding="utf-8")
    shutil.rmtree(record, ignore_errors=True)
    fresh.rename(record)
