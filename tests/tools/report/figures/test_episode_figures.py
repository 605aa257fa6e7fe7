# SPDX-License-Identifier: Apache-2.0
"""Figures of episodes add up over the steps of a run, and their section is a well-formed part of the page."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from recipe.async_pipeline.tools.report.drawing.episode_charts import episodes
from recipe.async_pipeline.tools.report.drawing.series import Series, series_of
from recipe.async_pipeline.tools.report.figures.episode_figures import EpisodeFigures, episode_figures
from tests.tools.report.pages import check, page_of


def test_steps_without_the_metric_are_left_out() -> None:
    rows = [
        SimpleNamespace(step=n, data=data) for n, data in enumerate([{"a": 1}, {}, {"a": "x"}, {"a": 2.5}])
    ]
    assert series_of(rows, "a") == Series(x=[0.0, 3.0], y=[1.0, 2.5])
    assert not series_of(rows, "b") and series_of(rows, "a")


def row(step: int, **values: float) -> Any:
    data = {f"async_pipeline/agentic/{name.replace('__', '/')}": value for name, value in values.items()}
    return SimpleNamespace(step=step, data=data)


def test_ends_and_attempts_are_summed_and_the_rest_is_by_step() -> None:
    rows = [
        row(1, success=0.25, turns__mean=4.0, turns__max=8.0, again=1.0, end__done=3.0, end__turns=1.0),
        row(2, model_s__mean=1.5, model_s__p95=2.0, env_s__mean=0.5, env_s__p95=1.0, gateway_ms_p95=3.0),
        row(2, success=0.5, turns__mean=5.0, turns__max=9.0, again=2.0, end__done=4.0, end__invalid=0.0),
    ]
    assert episode_figures(rows) == EpisodeFigures(
        success=Series(x=[1.0, 2.0], y=[0.25, 0.5]),
        turns_mean=Series(x=[1.0, 2.0], y=[4.0, 5.0]),
        turns_max=Series(x=[1.0, 2.0], y=[8.0, 9.0]),
        model_s=Series(x=[2.0], y=[1.5]),
        model_s_p95=Series(x=[2.0], y=[2.0]),
        env_s=Series(x=[2.0], y=[0.5]),
        env_s_p95=Series(x=[2.0], y=[1.0]),
        gateway_ms_p95=Series(x=[2.0], y=[3.0]),
        ends={"done": 7, "turns": 1},
        again=3,
    )


def test_a_run_of_single_responses_has_none() -> None:
    assert episode_figures([SimpleNamespace(step=1, data={"critic/score/mean": 0.5})]).ends == {}


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
