# SPDX-License-Identifier: Apache-2.0
"""The picture is a PNG; without matplotlib there is an error of one line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from recipe.async_pipeline.errors import ConfigError
from recipe.async_pipeline.lab.bench.inputs.workload import Workload
from recipe.async_pipeline.lab.bench.results.picture import draw
from recipe.async_pipeline.lab.bench.results.report import report
from tests.fakes.bench_results import RESULTS


def test_draw_writes_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    data = report("w", Workload(reason="r"), RESULTS, seed=1, command="", failed={}, stock_poll={})
    draw(data, tmp_path / "b.png")
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_draw_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        draw({"arms": {}}, tmp_path / "b.png")
