# SPDX-License-Identifier: Apache-2.0
"""The state of a verl tree against `patches/`, and the ways to change it.

Each touched file is *pristine* (as published), *applied* (as the series leaves it) or *diverged* (neither),
by its git blob id alone; there is no manifest. What changes a tree first computes and checks every resulting
file, writes them into a staging folder on the same disk, and only then swaps them in one by one.

Beside the tree's files lies `.async_pipeline_patches/`: a copy of the series that was applied. With it a
tree patched by an older series is brought up to date instead of being called diverged for good.
"""

from __future__ import annotations

import datetime
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from recipe.async_pipeline.errors import PatchedVerlRequired, PatchError
from recipe.async_pipeline.patching.unified_diff import NULL_ID, FileDiff, blob_id, format_diff, parse_diffs
from recipe.async_pipeline.patching.verl_source import find_verl_root

State = Literal["pristine", "applied", "diverged"]

HEADER_FIELDS = ("Subject", "Why", "Origin", "Forwarded", "Remove-When", "Last-Update", "Test")
"""What the header of every patch must state, in this order."""

RECORD = ".async_pipeline_patches"
"""Folder in a patched tree that holds the series it was patched with."""


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One file of the series."""

    name: str
    header: Mapping[str, str]
    head: bytes
    """All that precedes the first diff, byte for byte."""
    files: tuple[FileDiff, ...]


@dataclass(frozen=True, kw_only=True)
class FileState:
    """One touched file of a tree."""

    path: str
    state: State
    patches: tuple[str, ...]
    """Names of the patches that touch it, in series order."""


@dataclass(frozen=True, kw_only=True)
class PatchState:
    """A tree against the series."""

    verl_root: Path
    files: tuple[FileState, ...]

    @property
    def overall(self) -> State:
        """`applied` or `pristine` if every file is, else `diverged` (an empty series is applied anywhere)."""
        states = {file.state for file in self.files} or {"applied"}
        return states.pop() if len(states) == 1 else "diverged"

    @property
    def diverged(self) -> tuple[FileState, ...]:
        """The files that are neither pristine nor applied."""
        return tuple(file for file in self.files if file.state == "diverged")


@dataclass(frozen=True, kw_only=True)
class Series:
    """The patches of a folder, in order; each names for every file the blob id that its predecessor
    leaves.
    """

    patches: tuple[Patch, ...]

    @property
    def chains(self) -> dict[str, tuple[tuple[str, FileDiff], ...]]:
        """For each touched path its (patch name, diff) pairs, in series order."""
        chains: dict[str, tuple[tuple[str, FileDiff], ...]] = {}
        for patch in self.patches:
            for diff in patch.files:
                chains[diff.path] = (*chains.get(diff.path, ()), (patch.name, diff))
        return chains

    def check(self) -> None:
        """Raises PatchError: a patch expects a file in a state that its predecessors do not leave."""
        for path, chain in self.chains.items():
            for (_, before), (name, after) in zip(chain, chain[1:], strict=False):
                if before.new_id != after.old_id:
                    raise PatchError(
                        f"{name} expects {path} at {after.old_id}, the series before it leaves "
                        f"{before.new_id}; "
                        f"edit the tree, then run `async-pipeline patch refresh {name}`"
                    )


def patches_dir() -> Path:
    """Return the folder of PIN, series and patches: of the checkout, else of the installation.

    Raises PatchError: neither is there.
    """
    candidates = [
        Path(__file__).resolve().parents[3] / "patches",
        *(Path(sysconfig.get_path("data", scheme)) / "share/async_pipeline/patches" for scheme in _schemes()),
    ]
    for candidate in candidates:
        if (candidate / "PIN").is_file():
            return candidate
    raise PatchError(
        f"no patches folder; looked at {', '.join(map(str, candidates))}; reinstall async_pipeline"
    )


def _schemes() -> tuple[str, str]:
    return sysconfig.get_default_scheme(), sysconfig.get_preferred_scheme("user")


def parse_header(text: str) -> dict[str, str]:
    """Read `Field: value` lines; a line that begins with a space continues the one above."""
    fields: dict[str, str] = {}
    last = ""
    for line in text.splitlines():
        if line.startswith((" ", "\t")) and last:
            fields[last] += " " + line.strip()
        elif ":" in line:
            last, _, value = line.partition(":")
            fields[last] = value.strip()
    return fields


def load_series(folder: Path) -> Series:
    """Read and check the patches of `folder`, as its file `series` orders them.

    Raises PatchError: a listed patch is missing or unreadable, or the blob ids do not chain.
    """
    stamp = tuple(sorted((p.name, p.stat().st_mtime_ns) for p in folder.iterdir() if p.is_file()))
    return _load_series(folder, stamp)


@lru_cache(maxsize=8)
def _load_series(folder: Path, stamp: tuple[tuple[str, int], ...]) -> Series:
    """`stamp` is in the key only: an edited patch is read again."""
    del stamp
    series = Series(patches=tuple(_load_patch(folder / name) for name in series_names(folder)))
    series.check()
    return series


def series_names(folder: Path) -> tuple[str, ...]:
    """Return the patch names that `folder`'s `series` lists; `#` begins a comment."""
    file = folder / "series"
    if not file.is_file():
        raise PatchError(f"{file} is missing; restore it from version control")
    lines = (line.partition("#")[0].strip() for line in file.read_text(encoding="utf-8").splitlines())
    return tuple(line for line in lines if line)


def _load_patch(file: Path) -> Patch:
    if not file.is_file():
        raise PatchError(f"{file} is in the series but not there; restore it from version control")
    text = file.read_bytes()
    head = text.partition(b"diff --git ")[0]
    files = parse_diffs(text[len(head) :], source=file.name)
    return Patch(name=file.name, header=parse_header(head.decode()), head=head, files=files)


def patch_state(verl_root: Path, *, folder: Path | None = None) -> PatchState:
    """Classify every touched file of the tree at `verl_root`; reads only those files (milliseconds).

    Raises PatchError: the series itself is unreadable.
    """
    return _state_against(load_series(folder or patches_dir()), verl_root)


def _state_against(series: Series, verl_root: Path) -> PatchState:
    return _state_of({path: _read(verl_root / path) for path in series.chains}, series, verl_root)


def require_patched(verl_root: Path, *, folder: Path | None = None) -> None:
    """Raises PatchedVerlRequired: the tree at `verl_root` is not the pinned verl with our series applied."""
    state = patch_state(verl_root, folder=folder)
    if state.overall == "applied":
        return
    path = next(file.path for file in state.files if file.state != "applied")
    what = next(file.state for file in state.files if file.state != "applied")
    raise PatchedVerlRequired(f"{verl_root / path} is {what}; run `async-pipeline patch apply`, then retry")


def apply(verl_root: Path, *, folder: Path | None = None) -> tuple[str, ...]:
    """Bring the tree to *applied*; return the paths that changed (none if it was).

    A tree that an older series left is taken back first, with the copy of that series which it carries.
    Raises PatchError: a file is diverged (named, with the remedy); then nothing was changed.
    """
    folder = folder or patches_dir()
    series = load_series(folder)
    current = {path: _read(verl_root / path) for path in series.chains}
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
    """Bring the tree back to *pristine*, byte for byte; return the paths that changed (none if it was).

    Raises PatchError: a file is diverged (named, with the remedy); then nothing was changed.
    """
    series = load_series(folder or patches_dir())
    undone = _undo_recorded(verl_root, series)
    contents = {**{path: _read(verl_root / path) for path in series.chains}, **undone}
    _refuse_diverged(_state_of(contents, series, verl_root), "revert")
    wanted = {**undone, **_reverted(series, contents)}
    changed = _swap(verl_root, wanted)
    shutil.rmtree(verl_root / RECORD, ignore_errors=True)
    return changed


def _undo_recorded(verl_root: Path, series: Series) -> dict[str, bytes | None]:
    """Contents that take back the recorded series, if it is another one and the tree is exactly as it left
    it.
    """
    record = verl_root / RECORD
    if not (record / "series").is_file():
        return {}
    recorded = load_series(record)
    if recorded == series or _state_against(recorded, verl_root).overall != "applied":
        return {}
    return _reverted(recorded, {path: _read(verl_root / path) for path in recorded.chains})


def _reverted(series: Series, contents: Mapping[str, bytes | None]) -> dict[str, bytes | None]:
    result: dict[str, bytes | None] = {}
    for path, chain in series.chains.items():
        content = contents[path]
        if content is not None and blob_id(content) != chain[0][1].old_id:
            for _, diff in reversed(chain):
                content = diff.revert(content or b"")
            content = None if chain[0][1].creates else content
        result[path] = content
    return result


def _state_of(contents: Mapping[str, bytes | None], series: Series, verl_root: Path) -> PatchState:
    files = []
    for path, chain in series.chains.items():
        content = contents[path]
        actual = NULL_ID if content is None else blob_id(content)
        ids: dict[str, State] = {chain[0][1].old_id: "pristine", chain[-1][1].new_id: "applied"}
        names = tuple(name for name, _ in chain)
        files.append(FileState(path=path, state=ids.get(actual, "diverged"), patches=names))
    return PatchState(verl_root=verl_root, files=tuple(files))


def _refuse_diverged(state: PatchState, action: str) -> None:
    if not state.diverged:
        return
    named = ", ".join(f"{file.path} ({', '.join(file.patches)})" for file in state.diverged)
    raise PatchError(
        f"cannot {action} {state.verl_root}: diverged, neither as published nor as patched: {named}; "
        "nothing was "
        "changed. Keep your edit with `async-pipeline patch refresh PATCH`, or discard it with "
        "`async-pipeline patch fetch --fresh` (in a git clone: `git checkout` of the file)"
    )


def _read(file: Path) -> bytes | None:
    return file.read_bytes() if file.is_file() else None


def _swap(verl_root: Path, wanted: Mapping[str, bytes | None]) -> tuple[str, ...]:
    """Make the tree's files what `wanted` says (None: absent); return the paths that were not so already."""
    changes = {path: content for path, content in wanted.items() if _read(verl_root / path) != content}
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
    # The mode of the file it replaces: TemporaryDirectory is private, what lands in the tree is not.
    shutil.copymode(like if like.exists() else like.parent / "__init__.py", file)


def _write_record(verl_root: Path, folder: Path) -> None:
    """Put a copy of the applied series into the tree, ignored by the git of a user's clone."""
    record = verl_root / RECORD
    names = ("series", *series_names(folder))
    if record.is_dir() and all(_read(record / name) == _read(folder / name) for name in names):
        return
    fresh = Path(tempfile.mkdtemp(prefix=".staging-", dir=verl_root))
    for name in names:
        shutil.copyfile(folder / name, fresh / name)
    (fresh / ".gitignore").write_text("*\n", encoding="utf-8")
    shutil.rmtree(record, ignore_errors=True)
    fresh.rename(record)


def refresh(
    name: str,
    verl_root: Path,
    *,
    pristine: Callable[[str], bytes | None],
    add: Iterable[str] = (),
    folder: Path | None = None,
    today: datetime.date | None = None,
) -> bool:
    """Rewrite the diffs of patch `name` from the edited tree; return whether the patch changed.

    The files are those that the patch names, plus `add` (a new patch is a header and a line in `series`
    first). Their base is the published text (`pristine(path)`, None where there is no such file) with the
    series before `name` applied. The header stays, but for its Last-Update when the diffs change.
    Raises PatchError: no such patch, no file, no difference, or a later patch touches the same file.
    """
    folder = folder or patches_dir()
    names = series_names(folder)
    if name not in names:
        raise PatchError(f"{name} is not in {folder / 'series'}; it lists {', '.join(names) or 'nothing'}")
    patch = _load_patch(folder / name)
    before = Series(patches=tuple(_load_patch(folder / other) for other in names[: names.index(name)]))
    paths = [*dict.fromkeys([*(diff.path for diff in patch.files), *add])]
    if not paths:
        raise PatchError(
            f"{name} names no file yet; say which: `async-pipeline patch refresh {name} PATH...`"
        )
    _refuse_later_owner(folder, names[names.index(name) + 1 :], paths, name)
    diffs = b"".join(_rediff(path, before, pristine(path), verl_root, name) for path in paths)
    if diffs == (folder / name).read_bytes()[len(patch.head) :]:
        return False
    (folder / name).write_bytes(_dated(patch.head, today or datetime.date.today()) + diffs)
    return True


def _refuse_later_owner(folder: Path, later: tuple[str, ...], paths: list[str], name: str) -> None:
    for other in later:
        shared = sorted({diff.path for diff in _load_patch(folder / other).files} & set(paths))
        if shared:
            raise PatchError(
                f"{other} comes after {name} and touches {', '.join(shared)} too, so the edit in the tree "
                "cannot "
                f"be told from it; refresh {other}, or move the hunks there"
            )


def _rediff(path: str, before: Series, published: bytes | None, verl_root: Path, name: str) -> bytes:
    base = published
    for _, diff in before.chains.get(path, ()):
        base = diff.apply(base or b"")
    edited = _read(verl_root / path)
    if edited is None:
        raise PatchError(
            f"{verl_root / path}, which {name} names, is not there; a patch cannot delete a file"
        )
    if edited == base:
        raise PatchError(f"{path} is as before {name}, so nothing of it would be left; apply or edit first")
    return format_diff(path, base, edited)


def _dated(head: bytes, today: datetime.date) -> bytes:
    lines = head.splitlines(keepends=True)
    field = b"Last-Update:"
    stamp = b"%s %s\n" % (field, today.isoformat().encode())
    return b"".join(stamp if line.startswith(field) else line for line in lines)


__all__ = [
    "HEADER_FIELDS",
    "FileState",
    "Patch",
    "PatchState",
    "Series",
    "State",
    "apply",
    "find_verl_root",
    "load_series",
    "parse_header",
    "patch_state",
    "patches_dir",
    "refresh",
    "require_patched",
    "revert",
    "series_names",
]
