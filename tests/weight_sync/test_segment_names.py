# SPDX-License-Identifier: Apache-2.0
"""Segments whose owner is gone are swept; those of the living are not."""

from __future__ import annotations

import subprocess
import sys

from recipe.async_pipeline.weight_sync.segment_names import PREFIX, SHM_DIR, new_name, sweep_orphans


def test_names_are_random_and_ours() -> None:
    first, second = new_name(), new_name()
    assert first != second
    assert first.startswith(PREFIX)


def test_only_segments_of_dead_processes_are_swept() -> None:
    code = (
        "from recipe.async_pipeline.weight_sync.segment_names import SHM_DIR, new_name\n"
        "name = new_name(); (SHM_DIR / name).touch(); print(name)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    dead, alive = SHM_DIR / done.stdout.strip(), SHM_DIR / new_name()
    alive.touch()
    try:
        assert dead.exists()
        assert dead.name in sweep_orphans()
        assert not dead.exists()
        assert alive.exists()
    finally:
        alive.unlink()
