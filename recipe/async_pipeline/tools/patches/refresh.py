# SPDX-License-Identifier: Apache-2.0
"""Rewrite a patch of the series from the edited verl tree."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable
from pathlib import Path

from recipe.async_pipeline.errors import PatchError
from recipe.async_pipeline.installed.verl import patches_dir, read_or_none
from recipe.async_pipeline.tools.patches.series import PatchSeries, load_patch, series_names
from recipe.async_pipeline.tools.patches.unified_diff import format_diff


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

    Diffs the files that the patch names plus `add`; a new patch needs its header and its line in `series`
    first. The base of a diff is the published text (`pristine(path)`, None if there is no such file) with
    the patches before `name` applied. The header is kept, except for Last-Update when the diffs change.

    Raises PatchError if the patch is not in the series, names no file, makes no difference to a file, or a
    later patch touches the same file.
    """
    folder = folder or patches_dir()
    names = series_names(folder)
    if name not in names:
        raise PatchError(f"{name} is not in {folder / 'series'}; it lists {', '.join(names) or 'nothing'}")

    patch = load_patch(folder / name)
    before = PatchSeries(patches=tuple(load_patch(folder / other) for other in names[: names.index(name)]))
    paths = [*dict.fromkeys([*(diff.path for diff in patch.files), *add])]
    if not paths:
        raise PatchError(f"{name} names no file yet; name one: `async-pipeline patch refresh {name} PATH...`")
    _refuse_later_owner(folder, names[names.index(name) + 1 :], paths, name)
    diffs = b"".join(_rediff(path, before, pristine(path), verl_root, name) for path in paths)

    if diffs == (folder / name).read_bytes()[len(patch.head) :]:
        return False
    (folder / name).write_bytes(_dated(patch.head, today or datetime.date.today()) + diffs)
    return True


def _refuse_later_owner(folder: Path, later: tuple[str, ...], paths: list[str], name: str) -> None:
    """Raise PatchError if a patch after `name` touches one of `paths`."""
    for other in later:
        shared = sorted({diff.path for diff in load_patch(folder / other).files} & set(paths))
        if shared:
            raise PatchError(
                f"{other} comes after {name} and touches {', '.join(shared)} too, so the edit cannot be "
                f"attributed to {name}; refresh {other}, or move the hunks there"
            )


def _rediff(path: str, before: PatchSeries, published: bytes | None, verl_root: Path, name: str) -> bytes:
    """Return the diff from the tree before patch `name` to the edited tree, for one file."""
    base = published
    for _, diff in before.chains.get(path, ()):
        base = diff.apply(base or b"")
    edited = read_or_none(verl_root / path)
    if edited is None:
        raise PatchError(
            f"{verl_root / path}, which {name} names, does not exist; a patch cannot delete a file"
        )
    if edited == base:
        raise PatchError(f"{path} is as before {name}, so its diff would be empty; apply or edit first")
    return format_diff(path, base, edited)


def _dated(head: bytes, today: datetime.date) -> bytes:
    """Return the header with its Last-Update set to `today`."""
    lines = head.splitlines(keepends=True)
    field = b"Last-Update:"
    stamp = b"%s %s\n" % (field, today.isoformat().encode())
    return b"".join(stamp if line.startswith(field) else line for line in lines)
