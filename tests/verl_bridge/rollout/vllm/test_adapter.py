# SPDX-License-Identifier: Apache-2.0
"""Real engines on the CPU, with one and two ranks: what is served is what was published, tensor by tensor."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from recipe.async_pipeline.lab.job import with_cpu_settings
from tests import REPOSITORY
from tests.e2e.job import LIMIT_S

pytestmark = pytest.mark.real_engine

SCRIPT = Path(__file__).with_name("engine_matrix.py")
MODELS = ("qwen2-tied", "qwen3-untied", "llama", "qwen3-moe", "phi3-fused")
Cell = tuple[str, int]
"""A model, and its number of ranks."""
Reports = Callable[[Cell], dict[str, Any]]
LINEAR = ("qwen3-next", "qwen3.5")
"""Models that vLLM's CPU kernels compute in bfloat16."""
REORDERED = ("gpt-neox", "granite-hybrid", "falcon-h1", "nemotron-h", "llama4")
"""Models whose loaders do more than copy, so that no version is staged; see `test_declared_layers.py`."""
CELLS: tuple[Cell, ...] = (("qwen3-moe", 2),)
"""Experts and two ranks. Whole jobs serve dense models with one rank."""
SLOW_CELLS: tuple[Cell, ...] = (
    *((model, ranks) for ranks in (1, 2) for model in MODELS if (model, ranks) not in CELLS),
    *((model, ranks) for ranks in (1, 2) for model in ("granite-moe", "qwen3.5")),
    *((model, 1) for model in ("qwen3-next", *REORDERED)),
)
"""`test_layout.py` loads these models rank by rank, without an engine."""
CLOSE, CLOSE_IN_BF16 = 1e-4, 0.5
"""Largest difference of two log-probs that sums in another order give. In bfloat16, another token or expert
may win a near tie.
"""


@cache
def updates_experts() -> bool:
    """Return whether vLLM's experts can be updated on a CPU; vLLM is not imported for it."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return True  # the tests fail or are skipped for want of it
    experts = (
        Path(spec.origin).with_name("model_executor") / "layers" / "fused_moe" / "experts" / "cpu_moe.py"
    )
    return "class CPUUnquantizedExperts" in experts.read_text(encoding="utf-8")


def runs(cell: Cell) -> bool:
    return updates_experts() or not cell[0].endswith("-moe")


@pytest.fixture(scope="module")
def report_of() -> Reports:
    """Return the function that has the report of a cell; the cells of a tier share the import of vLLM."""
    reports_of = cache(run_cells)
    return lambda cell: reports_of(tuple(filter(runs, CELLS if cell in CELLS else SLOW_CELLS)))[cell]


def run_cells(cells: tuple[Cell, ...]) -> dict[Cell, dict[str, Any]]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "VERL_PLATFORM": "cpu",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    cell_names = [f"{model}@{ranks}" for model, ranks in cells]
    command = with_cpu_settings([sys.executable, "-W", "ignore", str(SCRIPT), *cell_names])
    done = subprocess.run(
        command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=LIMIT_S
    )
    lines = [line.removeprefix("REPORT ") for line in done.stdout.splitlines() if line.startswith("REPORT ")]
    found = {tuple(report["cell"]): report for report in map(json.loads, lines)}
    assert found.keys() == set(cells), done.stderr[-3000:]
    return found


def marked(cell: Cell) -> Any:
    model, ranks = cell
    slow = [pytest.mark.nightly] if cell in SLOW_CELLS else []
    once = pytest.mark.skipif(
        not runs(cell), reason="on a CPU, this vLLM packs experts at its first load only"
    )
    return pytest.param(cell, marks=[*slow, once], id=f"{model}@{ranks}")


every_cell = pytest.mark.parametrize("cell", [marked(cell) for cell in (*CELLS, *SLOW_CELLS)])


@every_cell
def test_three_versions_are_proved_and_computed_with(cell: Cell, report_of: Reports) -> None:
    """Through the loader, by repeated copies, and staged during generation if the loader only copies."""
    versions = report_of(cell)["versions"]
    for report in versions:
        # The second rank may have no sampled element of a tensor with few elements.
        assert report["proved"][0] == report["published"] <= min(report["proved"]) + cell[1] - 1
        assert report["furthest"] < (CLOSE_IN_BF16 if cell[0] in LINEAR else CLOSE)
        assert report["tokens"] == report["wanted"] or cell[0] in LINEAR
    assert [report["staged"] for report in versions] == [None, None, cell[0] not in REORDERED]
    assert len({tuple(report["tokens"]) for report in versions}) > 1, "the versions differ"


@every_cell
def test_a_fault_of_one_rank_is_named(cell: Cell, report_of: Reports) -> None:
    """The last rank's loader swaps two tensors of equal shape."""
    report = report_of(cell)
    assert any(name in report["caught"] for name in report["swapped"]), report["caught"]
    assert "is in the wrong place" in report["caught"]
