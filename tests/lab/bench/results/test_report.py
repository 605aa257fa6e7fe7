# SPDX-License-Identifier: Apache-2.0
"""The JSON and the tables, from invented figures."""

from __future__ import annotations

import json
from typing import Any

import pytest

from recipe.async_pipeline.lab.bench.inputs.workload import Workload
from recipe.async_pipeline.lab.bench.measuring.measure import StageWork
from recipe.async_pipeline.lab.bench.results.report import bounds, pools_of, report, table
from tests.fakes.bench_results import ONE, RESULTS, arm


@pytest.fixture
def data() -> dict[str, Any]:
    return report(
        "w",
        Workload(reason="why"),
        RESULTS,
        seed=1,
        command="async-pipeline bench",
        failed={"n_step_ahead": "status 1: boom"},
        stock_poll={"verl_sync": arm(2.0)},
    )


def test_ratios_are_paired_in_both_directions(data: dict[str, Any]) -> None:
    assert data["ratios"]["one_step_off/verl_sync"] == {"median": 2.0, "min": 2.0, "max": 2.0}
    assert data["ratios"]["verl_sync/one_step_off"]["median"] == 0.5
    assert set(data["ratios"]) == {"one_step_off/verl_sync", "verl_sync/one_step_off"}


def test_each_arm_has_its_figures(data: dict[str, Any]) -> None:
    row = data["arms"]["one_step_off"]
    assert row["samples_per_s"] == {"median": 12.0, "min": 8.0, "max": 16.0}
    assert row["lag_max"] == 1
    assert row["stall_train_s"] == 0.1
    assert row["stall_generate_s"] == 0.2
    # (3.0 + 0.9 + 0.1) / 2 batches in flight.
    assert row["bound_step_s"] == row["bound_terms_s"]["loop"] == pytest.approx(2.0)
    assert row["turns"][0]["work"]["tail_s"] == 3.0
    assert row["overlap_efficiency"]["max"] == pytest.approx(1.0)
    assert row["cpu_s"] == {"train": 1.0, "generate": 0.5}
    assert data["arms"]["verl_sync"]["stock_poll_samples_per_s"] == 2.0
    assert json.loads(json.dumps(data)) == data


def test_the_bound_uses_the_least_disturbed_turn_of_arms_of_the_same_kind() -> None:
    slow = arm(8.0, work=StageWork(9.0, 9.0, 5.0, 5.0, 0.3, 0.9, 2.0))
    found = bounds({"verl_sync": [slow], "on_policy": [ONE], "one_step_off": [slow, slow]}, 2)
    assert max(found["on_policy"].values()) == pytest.approx(3.0 + 0.9 + 0.1)
    assert max(found["one_step_off"].values()) == pytest.approx(2.0), (
        "latencies and work of on_policy, halved by two batches in flight"
    )
    assert max(found["verl_sync"].values()) == pytest.approx(3.0 + 5.0 + 0.1), (
        "the work of training on shared devices is from this arm"
    )


def test_devices_and_cores_can_be_the_bound() -> None:
    work = StageWork(
        tail_s=6.0, group_s=2.0, train_s=1.0, update_s=0.7, weights_s=0.1, generate_cpu_s=3.0, cpu_s=9.0
    )
    assert pools_of(work, False, 2) == {"devices": 3.0, "cores": 4.5}
    assert pools_of(work._replace(generate_cpu_s=0.5), False, 3) == {"devices": 1.0, "cores": 3.0}
    assert pools_of(work, True, 3)["devices"] == pytest.approx(1.0 + 1.5), "they train and generate in turn"


def test_the_tables_show_speed_time_cost_ratios_and_failures(data: dict[str, Any]) -> None:
    speed, polls, where, cost, ratios, failed = table(data).split("\n\n")
    for block in (speed, where, cost, ratios):
        assert len({line.count("|") for line in block.splitlines()}) == 1
    assert "× verl_sync" in speed.splitlines()[0]
    assert speed.splitlines()[3].startswith("| `one_step_off` | 12.0 [8.0 .. 16.0] | 2.00 [2.00 .. 2.00] |")
    assert polls == "verl's arms poll for finished responses every 0.02 s; as shipped, every 2 s."
    assert "2.00 (loop)" in where
    assert ratios.splitlines()[2] == "| `one_step_off` | 2.00 [2.00 .. 2.00] |"
    assert failed == "`n_step_ahead` failed: status 1: boom"


def test_the_table_may_have_only_failures() -> None:
    data = report("w", Workload(reason="r"), {}, seed=1, command="", failed={"verl_sync": "x"}, stock_poll={})
    assert "`verl_sync` failed: x" in table(data)
