# SPDX-License-Identifier: Apache-2.0
"""Real engines on the CPU, with one and two ranks: what is served is what was published, tensor by tensor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import REPOSITORY

pytestmark = pytest.mark.real_engine

SCRIPT = Path(__file__).with_name("engine_matrix.py")
MODELS = ("qwen2-tied", "qwen3-untied", "llama", "qwen3-moe", "phi3-fused")
CELLS = [(model, ranks) for model in MODELS for ranks in (1, 2)]
LIMIT_S = 540
CLOSE = 1e-4
"""Largest difference of two log-probs that float32 sums in another order give."""


@pytest.fixture(scope="module")
def matrix() -> dict[tuple[str, int], Any]:
    """The report of each cell; they share the import of vLLM."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "VERL_PLATFORM": "cpu",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    command = [sys.executable, "-W", "ignore", str(SCRIPT), *(f"{model}@{ranks}" for model, ranks in CELLS)]
    done = subprocess.run(
        command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=LIMIT_S
    )
    lines = [line.removeprefix("REPORT ") for line in done.stdout.splitlines() if line.startswith("REPORT ")]
    reports = {tuple(report["cell"]): report for report in map(json.loads, lines)}
    assert reports.keys() == set(CELLS), done.stderr[-3000:]
    return reports


@pytest.mark.parametrize(("model", "ranks"), CELLS)
def test_three_versions_are_proved_and_computed_with(matrix: Any, model: str, ranks: int) -> None:
    """Through the loader, by repeated copies, and staged during generation."""
    versions = matrix[model, ranks]["versions"]
    for report in versions:
        assert report["proved"] == [report["published"]] * ranks
        assert report["tokens"] == report["wanted"]
        assert report["furthest"] < CLOSE
    assert [report["staged"] for report in versions] == [None, None, True]
    assert len({tuple(report["tokens"]) for report in versions}) > 1, "the versions differ"


@pytest.mark.parametrize(("model", "ranks"), CELLS)
def test_a_fault_of_one_rank_is_named(matrix: Any, model: str, ranks: int) -> None:
    """The last rank's loader swaps two tensors of equal shape."""
    report = matrix[model, ranks]
    assert any(name in report["caught"] for name in report["swapped"]), report["caught"]
    assert "is in the wrong place" in report["caught"]
