# SPDX-License-Identifier: Apache-2.0
"""The machine is described without a package that may be missing."""

from __future__ import annotations

import psutil

from recipe.async_pipeline.lab.bench.machine import machine


def test_the_machine_is_described() -> None:
    assert machine()["cores"] >= 1
    assert machine()["cpu"]
    assert machine()["memory_gib"] == round(psutil.virtual_memory().total / 2**30, 1)
