# SPDX-License-Identifier: Apache-2.0
"""The timeline has a row for each pool and stage, in order, and embeds the data to zoom if it is small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipe.async_pipeline.tools.report.drawing import timeline as module
from recipe.async_pipeline.tools.report.drawing.timeline import timeline
from recipe.async_pipeline.tools.report.figures.data import RunData, data_of
from recipe.async_pipeline.tools.report.figures.run_reader import read_run
from tests.observe.run_folder import RecordedTrainer, write_run
from tests.tools.report.pages import Page


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    trainer = RecordedTrainer(
        max_lag=1,
        steps=12,
        places={"ref_logp": "ref"},
        costs={"advantage": 0.1, "assemble": 0.1, "draw": 0.1},
    )
    return data_of(read_run(write_run(tmp_path_factory.mktemp("runs") / "run", trainer)))


def test_rows_are_pools_with_their_stages_then_stages_without_devices(run: RunData) -> None:
    names = [
        text
        for text in Page(timeline(run)).texts
        if text in {*run.roles, "no device"} or text.split(":")[0] in run.pools
    ]
    once = names[: len(names) // 2]
    assert once == [
        *("train: 4 devices", "logp", "train", "param_update"),
        *("generate: 4 devices", "generate"),
        *("ref: 1 device", "ref_logp"),
        *("no device", "dataloader", "rollout", "reward"),
    ]
    assert names == once * 2, "the overview and the close-up have the same rows"


def test_the_close_up_shows_middle_steps_and_zooms(run: RunData) -> None:
    page = Page(timeline(run))
    data = json.loads(
        next(str(attrs["data-timeline"]) for attrs in page.all("div") if "data-timeline" in attrs)
    )

    ends = list(run.step_ends.values())
    assert (data["from"], data["to"]) == (pytest.approx(ends[3], abs=1e-3), pytest.approx(ends[7], abs=1e-3))
    assert [row["pool"] for row in data["rows"]] == [
        True,
        False,
        False,
        False,
        True,
        False,
        True,
        False,
        False,
        False,
        False,
    ]

    for row in data["rows"]:
        assert all(0 <= span[0] < span[1] <= data["end"] for span in row["spans"])
    kinds = [kind["name"] for kind in data["kinds"]]
    assert kinds[0].startswith(("training", "generating", "log-probs"))
    assert any("Steps 5 to 8" in text for text in page.texts)


def test_a_run_with_too_many_spans_is_drawn_without_zoom(
    run: RunData, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_SPANS", 10)
    html = timeline(run)
    assert "data-timeline" not in html
    assert Page(html).all("rect")


def test_a_run_without_events_has_no_timeline(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "data": {"timing_s/step": 1.0}}\n')
    assert timeline(data_of(read_run(tmp_path))) == ""
