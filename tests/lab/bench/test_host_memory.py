# SPDX-License-Identifier: Apache-2.0
"""What a segment of this package occupies is counted, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipe.async_pipeline.lab.bench import host_memory
from recipe.async_pipeline.weight_sync.memory.segment_names import new_name


def test_occupied_memory_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "SHM_DIR", tmp_path)
    assert host_memory.host_memory_bytes() == 0
    (tmp_path / "of_somebody_else").write_bytes(b"1" * (1 << 16))
    for _ in range(2):
        (tmp_path / new_name()).write_bytes(b"1" * (1 << 16))
    sparse = tmp_path / new_name()
    with sparse.open("wb") as file:
        file.truncate(1 << 20)
    assert host_memory.host_memory_bytes() == 2 << 16
