# SPDX-License-Identifier: Apache-2.0
"""A verl tree as it will be once the patches are on it, and which of them still fit."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from recipe.async_pipeline.errors import PatchError
from recipe.async_pipeline.installed.verl import NULL_ID, blob_id
from recipe.async_pipeline.tools.patches.series import PatchSeries
from recipe.async_pipeline.tools.patches.unified_diff import FileDiff, git_apply

from .sources import OURS, THEIRS, Sources

TreeFit = Literal["fits", "applied", "moved", "upstream", "broken"]

STATES: dict[TreeFit, str] = {
    "fits": "applies",
    "applied": "is applied",
    "moved": "applies at other lines: rewrite it with `async-pipeline patch refresh`",
    "upstream": "is in verl already: drop it",
    "broken": "does not apply: the lines that it changes are different",
}


@dataclass(frozen=True, kw_only=True)
class PatchFit:
    """How one patch fits one file of a tree."""

    patch: str
    path: str
    state: TreeFit


def patched(root: Path, series: PatchSeries) -> tuple[dict[Path, bytes], list[PatchFit]]:
    """Return the contents of the touched files with the series applied as far as it fits, and how it fits."""
    contents: dict[Path, bytes] = {}
    fits: list[PatchFit] = []
    for path, chain in series.chains.items():
        file = root / path
        content = file.read_bytes() if file.is_file() else b""
        if content and blob_id(content) == chain[-1][1].new_id:
            fits += [PatchFit(patch=name, path=path, state="applied") for name, _ in chain]
        else:
            for name, diff in chain:
                content, state = _applied(diff, content)
                fits.append(PatchFit(patch=name, path=path, state=state))
        if content:
            contents[file] = content
    return contents, fits


def _applied(diff: FileDiff, content: bytes) -> tuple[bytes, TreeFit]:
    if (NULL_ID if diff.creates and not content else blob_id(content)) == diff.old_id:
        return diff.apply(content), "fits"
    if diff.creates:
        return content, "broken"
    with suppress(PatchError):
        git_apply(diff, content, reverse=True)
        return content, "upstream"
    with suppress(PatchError):
        return git_apply(diff, content), "moved"
    return content, "broken"


def sources_of(root: Path, contents: dict[Path, bytes]) -> Sources:
    """Return verl's tree, with `contents` in place of some files, and this package.

    Raises PatchError if `root` has no verl.
    """
    if not (root / THEIRS / "__init__.py").is_file():
        raise PatchError(f"{root} has no verl/__init__.py; give the folder that contains verl/")
    package = Path(__file__).resolve().parents[2]

    def read(file: Path) -> bytes:
        return contents[file] if file in contents else file.read_bytes()

    return Sources(
        roots={THEIRS: root / THEIRS, OURS: package},
        read=read,
        exists=lambda file: file in contents or file.is_file(),
    )
