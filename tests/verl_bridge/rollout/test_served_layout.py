# SPDX-License-Identifier: Apache-2.0
"""The engines' own tables explain the models that users train, and notice what a wrong loader does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fakes.engine_trees import run_with, tree_of
from tests.fakes.layout_coverage import FURTHER, MODELS

EXPLAINED = {"gpt-oss": 0.9999}
"""The share of the served elements that the tables must explain, where it is not all of them."""
OF_OTHERS = 0.95
"""The same of releases that the table of `docs/models.md` is not about."""
OTHERS = (("vllm", "0.24.0"), ("vllm", "0.33.0"), ("sglang", "0.5.23"))
"""The oldest and the newest ones; `tests/e2e/test_engine_releases.py` has more."""
CANNOT_LOAD = {
    ("vllm", "0.24.0"): {"gpt-oss": "KeyError: 'layers.0.mlp.experts.w13_weight'"},
    ("sglang", ""): {
        "gemma2": "'Gemma2Config' object has no attribute 'hidden_act'",
        "gemma3": "KeyError: 'factor'",
        "phimoe": "Torch not compiled with CUDA enabled",
    },
}
"""Models that an engine cannot make or load in bfloat16 on this machine, and how it fails."""


def reports_of(engine: str, version: str, folder: Path, models: Sequence[str]) -> dict[str, Any]:
    """Return what `layout_coverage` finds out about the models that the engine can load."""
    tree = tree_of(engine, version) if version else None
    done = run_with(tree, "tests.fakes.layout_coverage", engine, str(folder), *models)
    lines = [line.removeprefix("REPORT ") for line in done.stdout.splitlines() if line.startswith("REPORT ")]
    reports = {report["model"]: report for report in map(json.loads, lines)}
    assert tuple(reports) == tuple(models), done.stderr[-3000:]
    for model, why in CANNOT_LOAD.get((engine, version), {}).items():
        if model in reports:
            assert why in reports.pop(model)["error"]
    return reports


def check(reports: Mapping[str, Any], *, tested: bool) -> None:
    for model, report in reports.items():
        assert "error" not in report, f"{model}: {report['error']}"
        least = EXPLAINED.get(model, 1.0) if tested else OF_OTHERS
        assert report["share"] >= least, f"{model}: {report}"
        assert not report["missed"], f"{model}: {report}"
        assert len(report["seen"]) >= 2, report


@pytest.mark.real_engine
@pytest.mark.parametrize(
    ("engine", "version"),
    [("vllm", ""), ("sglang", ""), *(pytest.param(*one, marks=pytest.mark.nightly) for one in OTHERS)],
)
def test_the_tables_explain_each_model_and_notice_each_fault(
    engine: str, version: str, tmp_path: Path
) -> None:
    check(reports_of(engine, version, tmp_path, MODELS), tested=not version)


@pytest.mark.nightly
@pytest.mark.real_engine
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_tables_explain_further_models(engine: str, tmp_path: Path) -> None:
    check(reports_of(engine, "", tmp_path, FURTHER), tested=True)


@pytest.mark.parametrize(
    ("method", "mapped", "wanted"),
    [
        ("_map_name_with_shard", ("fused", "q"), ("fused", "q")),
        ("_map_name_with_shard", ("fused", ["k", "v"]), ("fused", ["k", "v"])),
        ("_map_name_with_shard", None, None),
        ("map_name", "renamed", ("renamed", None)),
        ("_map_name", "renamed", ("renamed", None)),
        ("_map_name", None, None),
    ],
)
def test_a_mapper_is_called_by_the_method_that_it_has(
    module: Any, method: str, mapped: Any, wanted: Any
) -> None:
    mapper = SimpleNamespace(**{method: lambda name: mapped})
    assert module.mapped_name(mapper, "name") == wanted


def test_a_mapper_without_a_known_method_is_an_error(module: Any) -> None:
    with pytest.raises(AttributeError, match="_map_name_with_shard"):
        module.mapped_name(SimpleNamespace(), "name")
