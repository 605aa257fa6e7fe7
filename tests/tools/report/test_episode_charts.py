# SPDX-License-Identifier: Apache-2.0
"""The section about episodes is a well-formed part of the page, and empty without them."""

from __future__ import annotations

from recipe.async_pipeline.tools.report.episode_charts import episodes
from recipe.async_pipeline.tools.report.episode_figures import EpisodeFigures
from recipe.async_pipeline.tools.report.series import Series
from tests.tools.report.pages import check, page_of


def test_without_episodes_there_is_no_section() -> None:
    assert episodes(EpisodeFigures()) == ""


def test_success_turns_and_ends_are_shown() -> None:
    series = Series(x=[1.0, 2.0], y=[0.25, 0.5])
    found = EpisodeFigures(
        success=series,
        turns_mean=series,
        turns_max=series,
        model_s=series,
        gateway_ms_p95=series,
        ends={"done": 6, "redundant": 2},
        again=3,
    )
    shown = check(page_of(episodes(found)))
    assert {"done: 6", "redundant: 2", "3 failed attempts were repeated."} <= {
        one.strip() for one in shown.texts
    }
    for title in ("What an episode waits for", "What the gateway adds to a request"):
        assert any(title in one for one in shown.texts)
    assert any("Success" in one for one in shown.texts) and any("Turns" in one for one in shown.texts)
