# SPDX-License-Identifier: Apache-2.0
"""The Grafana dashboard parses, and names only metrics that a run sends to Ray."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipe.async_pipeline import AsyncTrainingFlow
from recipe.async_pipeline.core.groups.items import Publication, Trajectory
from recipe.async_pipeline.core.waits.clock import run_virtual
from recipe.async_pipeline.observe.account.accountant import StepAccountant
from recipe.async_pipeline.observe.samples.off_policy import Columns, OffPolicyMeter
from tests.fakes.trainer import SimTrainer

PATH = Path(__file__).resolve().parents[1] / "configs" / "grafana" / "async_pipeline.json"
PREFIX = "ray_async_pipeline_"


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    found = json.loads(PATH.read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def gauge(metric: str) -> str:
    """As the bridge names it, which cannot be imported without Ray."""
    return PREFIX + re.sub(r"[^a-zA-Z0-9_]", "_", metric)


@pytest.fixture(scope="module")
def known() -> set[str]:
    """What runs send, from what makes it: a run in virtual time, the meters, the fields of a publication."""
    accounts = StepAccountant()
    flow = AsyncTrainingFlow(SimTrainer(max_lag=1, steps=4))
    flow.log.subscribe(accounts)
    run_virtual(flow.run())
    trained = next(record for record in flow.log.records if record.event == "TRAINED")
    ones = np.zeros(3, dtype=np.float32)
    meter = OffPolicyMeter(trainer_version=1, max_lag=1)
    described = Trajectory(key="", first_version=0, last_version=0, num_tokens=3)
    meter.add([described], Columns(np.array([3]), np.ones(3), ones, ones))
    facts = [name for name in trained.fields if "/" in name]
    published = [f"param_update/{field.name}" for field in fields(Publication)]
    return {gauge(name) for name in (*facts, *accounts.take(), *meter.metrics(), *published)}


def expressions(dashboard: dict[str, Any]) -> Iterator[str]:
    for panel in dashboard["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["definition"]
            yield variable["query"]["query"]


def test_every_metric_that_it_names_exists(dashboard: dict[str, Any], known: set[str]) -> None:
    named = {
        name
        for text in expressions(dashboard)
        for name in re.findall(rf"\b{PREFIX}\w+\b", re.sub(r'"[^"]*"', "", text))
    }
    assert len(named) > 15
    assert named - known == set()


def test_every_pattern_matches_metrics_of_pools(dashboard: dict[str, Any], known: set[str]) -> None:
    patterns = {p for text in expressions(dashboard) for p in re.findall(rf'"({PREFIX}[^"]*)"', text)}
    assert patterns
    for pattern in patterns:
        found = {name for name in known if re.fullmatch(pattern, name)}
        assert {f"{PREFIX}idle_train_wait_generate_s", f"{PREFIX}busy_generate_compute_generate_s"} <= found


def test_panels_do_not_overlap_and_follow_the_variables(dashboard: dict[str, Any]) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
        assert panel["datasource"]["uid"] == "${datasource}"
        assert all('run=~"$run"' in target["expr"] for target in panel["targets"])
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))


def test_names_are_made_as_the_bridge_makes_them() -> None:
    file = "recipe/async_pipeline/verl_bridge/trainer/reporting/ray_metrics.py"
    source = (PATH.parents[2] / file).read_text(encoding="utf-8")
    assert '_NOT_IN_A_NAME = re.compile(r"[^a-zA-Z0-9_]")' in source
    assert 'PREFIX = "async_pipeline/"' in source
    assert gauge("lag/mean") == "ray_async_pipeline_lag_mean"
