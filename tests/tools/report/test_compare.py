# SPDX-License-Identifier: Apache-2.0
"""The comparison of two runs: different settings, figures with the right sign, and partial runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from recipe.async_pipeline.tools.report.compare import compare_page
from recipe.async_pipeline.tools.report.figures.data import RunData, data_of
from recipe.async_pipeline.tools.report.figures.run_reader import read_run
from tests.observe.run_folder import RecordedTrainer, write_run
from tests.tools.report.pages import check


def run_in(folder: Path, **kwargs: object) -> RunData:
    lag = kwargs.get("max_lag", 0)
    config = {"trainer": {"v1": {"async_pipeline": {"staleness": {"max_lag": lag}, "run_dir": str(folder)}}}}
    return data_of(read_run(write_run(folder, RecordedTrainer(steps=10, **kwargs), config=config)))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunData, RunData]:
    folder = tmp_path_factory.mktemp("runs")
    return run_in(folder / "slow", max_lag=0), run_in(
        folder / "fast", max_lag=2, order="finished", places={"ref_logp": "ref"}
    )


def test_the_comparison_is_complete_and_self_contained(runs: tuple[RunData, RunData]) -> None:
    page = check(compare_page(*runs))
    assert [attrs["id"] for attrs in page.all("section")] == [
        "figures",
        "settings",
        "devices",
        "steps",
        "learning",
        "freshness",
        "advice",
        "samples",
    ]
    at = page.texts.index("trainer.v1.async_pipeline.staleness.max_lag")
    assert page.texts[at + 1 : at + 3] == ["0", "2"]
    assert "trainer.v1.async_pipeline.run_dir" not in page.texts
    assert "A: has no such pool" in page.texts


def test_a_change_is_rated_by_its_figure(runs: tuple[RunData, RunData]) -> None:
    a, b = runs
    assert a.samples_per_s is not None and b.samples_per_s is not None
    texts = check(compare_page(a, b)).texts

    def change(name: str) -> str:
        return texts[texts.index(name) + 3]

    assert change("Responses trained per second") == f"{b.samples_per_s / a.samples_per_s - 1:+.0%} better"
    assert change("Step time, median").startswith("-")
    assert change("Step time, median").endswith("better")
    assert change(f"Devices idle, {a.typical_time}").endswith("points better")
    assert change("Lag, mean, versions").startswith("+")
    assert change("Lag, mean, versions").endswith(" worse")
    assert change("Wall time").endswith("%"), "neither better nor worse"


def test_a_partial_run_is_compared_with_the_data_it_has(runs: tuple[RunData, RunData]) -> None:
    a, b = runs
    partial = replace(
        b,
        accounting=None,
        warm=None,
        pools={},
        config={},
        missing=("events.jsonl does not exist: no timeline",),
    )
    page = check(compare_page(a, partial))
    assert "B: events.jsonl does not exist: no timeline" in page.texts
    assert "Unknown: at least one run has no config.json." in page.texts
    assert not any(text.startswith("Overlap efficiency") for text in page.texts)


def test_a_run_compared_with_itself_has_no_differences(runs: tuple[RunData, RunData]) -> None:
    texts = check(compare_page(runs[0], runs[0])).texts
    assert "Only names and paths differ." in texts
    assert not any(text.endswith((" better", " worse")) for text in texts)
