# SPDX-License-Identifier: Apache-2.0
"""verl as it was published, without our patches."""

from __future__ import annotations

from pathlib import Path

from recipe.async_pipeline.installed.verl import patches_dir
from recipe.async_pipeline.tools.patches import verl_source


def unpacked(folder: Path) -> Path:
    """Unpack the pinned verl into `folder`, and return its root."""
    patches = patches_dir()
    stem = verl_source.read_pin(patches).stem
    verl_source.unpack(verl_source.fetch_sdist(patches), folder, top=stem)
    return folder / stem
