# SPDX-License-Identifier: Apache-2.0
"""The sections of a report, each on its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from recipe.async_pipeline.tools.report.drawing.series import Series
from recipe.async_pipeline.tools.report.figures.data import Published, RunData
from recipe.async_pipeline.tools.report.sections import (
    fates,
    freshness,
    learning,
    ordered,
    publications,
    step_chart,
)
from tests.tools.report.accounts import run_of, work


def with_steps(run: RunData, *seconds: Mapping[str, float]) -> RunData:
    assert run.accounting is not None
    steps = [
        replace(run.accounting.steps[0], step=n, seconds=each) for n, each in enumerate(seconds, start=1)
    ]
    return replace(run, accounting=replace(run.accounting, steps=steps))


def test_the_step_chart_leaves_out_a_first_step_that_dwarfs_the_others() -> None:
    run = run_of(work(0.5, 0.5))
    usual = {"generate": 4.0, "train": 6.0}
    html = step_chart(with_steps(run, {"generate": 900.0, "train": 1.0}, usual, usual, usual))
    assert "The first step is left out: it took 15 min, of which 15 min for generate." in html
    assert "left out" not in step_chart(with_steps(run, usual, usual, usual, usual))


def test_work_comes_before_waiting_and_start_up_comes_last() -> None:
    seconds = {"start_up": 50.0, "wait_train": 30.0, "sync": 5.0, "compute_generate": 15.0, "none": 0.01}
    assert ordered(seconds, 100.0) == [
        ("compute_generate", 15.0, 0.15),
        ("sync", 5.0, 0.05),
        ("wait_train", 30.0, 0.3),
        ("start_up", 50.0, 0.5),
    ]
    assert ordered(seconds, 0.0) == []


def test_a_section_without_data_is_empty() -> None:
    run = run_of(work(0.5, 0.5))
    assert fates(run) == ""
    assert freshness([run]) == ""


def test_weight_updates_say_what_the_tables_of_the_engine_explain() -> None:
    done = Published(
        version=1,
        t=1.0,
        gather_s=1.0,
        transfer_s=1.0,
        load_s=1.0,
        commit_s=1.0,
        stall_s=1.0,
        num_bytes=8.0,
        replicas=1,
        explained_share=0.985,
    )
    run = replace(run_of(work(0.5, 0.5)), publications=[done])
    assert "The engine&#39;s own tables explain 98.5 % of the served elements." in publications(run)
    blind = replace(done, version=2, explained_share=0.0, unexplained="head.weight")
    html = publications(replace(run, publications=[done, blind]))
    assert "WARNING" in html and "explain 0.0 %" in html and "such as head.weight," in html
    assert "tables" not in publications(replace(run, publications=[replace(done, explained_share=None)]))


def test_the_lag_histogram_names_the_allowed_lag() -> None:
    run = run_of(work(0.5, 0.5), lag_share={0: 0.25, 1: 0.75}, lag_mean=Series(x=[1.0, 2.0], y=[0.0, 1.0]))
    assert "75%" in freshness([run])
    assert "The allowed lag is 1 (max_lag)" in freshness([run])


def test_the_load_of_the_experts_is_drawn_for_a_mixture_only() -> None:
    title = "Tokens of the busiest expert"
    load, worst = Series(x=[1.0, 2.0], y=[1.5, 1.2]), Series(x=[1.0, 2.0], y=[2.5, 2.0])
    html = learning([run_of(work(0.5, 0.5), busiest_expert=load, busiest_expert_worst=worst)])
    assert title in html and "mean of the layers" in html and "worst layer" in html
    assert title not in learning([run_of(work(0.5, 0.5), reward=load)])
