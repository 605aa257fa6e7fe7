# SPDX-License-Identifier: Apache-2.0
"""The pictures of a run directory: `pictures/*.png`, and `pictures/index.jsonl` with a line about each.

A resumed run draws some steps again; the last line about a file counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

FOLDER, INDEX = "pictures", "index.jsonl"


class Picture(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is known of one picture."""

    step: int
    """The optimizer step that trained it."""
    file: str
    prompt: str
    reward: float | None
    first_version: int
    """Version of its first step with noise."""
    last_version: int
    png: bytes = b""
    """Filled in when the folder is read."""


class PictureFolder:
    """Writes the folder; made with the first picture."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FOLDER

    def place_of(self, about: Picture) -> Path:
        """Return where the file of a picture belongs; its folder exists."""
        self._path.mkdir(parents=True, exist_ok=True)
        return self._path / about.file

    def add(self, pictures: Sequence[Picture]) -> None:
        """Describe pictures whose files are written."""
        if not pictures:
            return
        with (self._path / INDEX).open("ab") as index:
            index.write(b"".join(msgspec.json.encode(one) + b"\n" for one in pictures))
