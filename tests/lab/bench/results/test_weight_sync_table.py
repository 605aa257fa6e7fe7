# SPDX-License-Identifier: Apache-2.0
"""Ratios, shares of the machine's limits, and the table of the weight-sync benchmark."""

from __future__ import annotations

from typing import Any

import pytest

from recipe.async_pipeline.lab.bench.results.weight_sync_table import complete, ratios, table


def spread(value: float) -> dict[str, float]:
    return {"median": value, "min": value, "max": value}


def row(stall: float, **more: Any) -> dict[str, Any]:
    return {name: spread(stall) for name in ("trainer_stall_s", "generator_stall_s", "publication_s")} | more


def test_ratios_are_this_package_over_verl() -> None:
    found = ratios({"dual_buffer": row(1.0), "dual_buffer_host": row(2.0), "verl_stock": row(4.0)})
    assert found["generator_stall"] == found["trainer_stall"] == 0.25
    assert found["generator_stall_host"] == found["trainer_stall_host"] == 0.5


def test_without_verls_manager_there_is_no_ratio_and_without_its_stall_only_one() -> None:
    assert ratios({"dual_buffer": row(1.0)}) == {}
    stock = row(4.0)
    del stock["generator_stall_s"]
    assert ratios({"dual_buffer": row(1.0), "verl_stock": stock}) == {"trainer_stall": 0.25}


def test_rates_are_compared_with_a_plain_copy_and_updates_with_the_fewest_replicas() -> None:
    data: dict[str, Any] = {
        "limits": {"memcpy_gb_s": 10.0, "shm_gb_s": 9.0},
        "replicas": {
            "1": {"dual_buffer": row(0.2, gather_gb_s=8.0, transfer_gb_s=5.0, load_gb_s=1.0)},
            "4": {
                "dual_buffer": row(0.3, host_memory_versions=2.05, unhidden_s={"gather": 0.05, "copy": 0.1}),
                "verl_stock": row(3.0),
            },
        },
    }
    complete(data)
    complete(data)
    one, four = (data["replicas"][number]["dual_buffer"] for number in ("1", "4"))
    assert one["share_of_memcpy"] == {"gather": 0.8, "transfer": 0.5}
    assert (one["publication_growth"], four["publication_growth"]) == (1.0, pytest.approx(1.5))
    assert "publication_growth" not in data["replicas"]["4"]["verl_stock"]

    lines = table(data).splitlines()
    assert lines[3].startswith("| 4 | `dual_buffer` | 300 [300 .. 300] |")
    assert lines[3].endswith("| 1.50 × | 2.05 versions |")
    shown = "dual_buffer, 1 replicas, GB/s: gather 8.0, transfer 5.0, load 1.0 (gather 80% of a plain"
    assert shown in table(data)
    assert "parts of the stalls (dual_buffer, 4 replicas), ms: gather 50, copy 100" in table(data)
    assert "dual_buffer / verl_stock, 4 replicas: generator stall 0.10, trainer stall 0.10" in table(data)
