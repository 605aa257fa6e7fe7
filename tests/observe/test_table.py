# SPDX-License-Identifier: Apache-2.0
"""The table of steps: titles align with their values, and the closing lines summarize the run."""

from __future__ import annotations

import re
from typing import Any

import pytest

from recipe.async_pipeline.observe.table import MARK, TRANSIENT, StepRow, closing, header, progress


def row(**changes: Any) -> StepRow:
    values: dict[str, Any] = {
        "step": 7,
        "last_step": 80,
        "reward": 0.5,
        "tokens": 3.25,
        "lag_mean": 0.75,
        "lag_max": 1.0,
        "served": 6.0,
        "kl": 0.00012,
        "train_s": 0.51,
        "step_s": 2.0,
        "samples": 256,
    }
    return StepRow(**{**values, **changes})


def ends(text: str) -> list[int]:
    """Return the end position of each word."""
    return [found.end() for found in re.finditer(r"\S+", text)]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"step": 1000, "last_step": 1000},
        {"reward": -1.5, "kl": -0.00345},
        {"tokens": 8192.5, "lag_mean": 3.0, "served": 999.0, "train_s": 1234.5, "samples": 4096},
    ],
)
def test_header_and_rows_are_aligned(changes: dict[str, Any]) -> None:
    titles, values = header(), row(**changes).render()
    assert len(titles) == len(values)
    assert ends(titles) == ends(values)
    assert titles.startswith(MARK) and values.startswith(MARK)


def test_progress_shows_the_step_and_the_slowest_stage() -> None:
    line = progress(row(), untrained=48.0, finished=12.0, critical="generate")
    assert line == (
        f"{TRANSIENT} step 7/80  reward 0.500  128.0 samples/s  lag 0.75 (max 1)  "
        "queue: 48 groups in flight, 12 finished  slowest: generate"
    )
    assert "slowest" not in progress(row(step_s=0.0), untrained=0, finished=0, critical="")


def test_closing_shows_the_use_of_devices_if_known() -> None:
    facts: dict[str, Any] = {"bubble_ratio": 0.25, "overlap_efficiency": 0.8}
    known = [line for line in closing(SUMMARY | facts) if "devices idle" in line]
    assert len(known) == 1
    assert (
        "since the first version was served: devices idle 25% of the time, overlap efficiency 80% ("
        in known[0]
    )
    assert known[0].endswith("the report leaves out the first step")
    assert not any("devices idle" in line for line in closing(SUMMARY))
    nothing = SUMMARY | facts | {"steps": 0, "groups_trained": 0}
    assert not any("devices idle" in line for line in closing(nothing)), "there was no work to arrange"


@pytest.mark.parametrize(("kl", "cell"), [(-0.0, "0.00000"), (-4e-6, "0.00000"), (-6e-6, "-0.00001")])
def test_a_value_that_rounds_to_zero_has_no_sign(kl: float, cell: str) -> None:
    assert row(kl=kl).render().removeprefix(MARK).split()[6] == cell
    assert ends(row(kl=kl).render()) == ends(header())


def test_cells_of_a_row() -> None:
    words = row().render().removeprefix(MARK).split()
    assert words == ["7/80", "0.500", "3.2", "0.75", "1", "6", "0.00012", "0.51", "2.00", "128.0"]
    assert header().removeprefix(MARK).split() == [
        *("step", "reward", "tokens", "lag", "lag_max", "served", "kl", "train_s", "step_s", "samples/s")
    ]


def test_a_step_of_zero_seconds_has_rate_zero() -> None:
    assert row(step_s=0.0).render().endswith(" 0.0")


SUMMARY: dict[str, object] = {
    "status": "completed",
    "strategy": "one_step_off",
    "steps": 80,
    "train_s": 140.5,
    "reward_first": 0.25,
    "reward_last": 0.75,
    "lag_max": 1,
    "max_lag": 1,
    "groups_drawn": 1290,
    "groups_trained": 1280,
    "groups_filtered": 7,
    "groups_expired": 3,
    "groups_failed": 0,
    "groups_in_flight": 0,
    "groups_regenerated": 0,
    "served_version": 80,
    "trainer_version": 80,
    "overlap_s": 55.2,
    "error": None,
}


def test_closing_lines_of_a_completed_run() -> None:
    lines = closing(SUMMARY)
    assert all(line.startswith(f"{MARK} ") for line in lines)
    text = "\n".join(lines)
    for part in (
        "completed: one_step_off, 80 steps in 140.5 s",
        "0.250 -> 0.750",
        "lag_max 1 of 1",
        "55.2 s",
        "1290 groups drawn: 1280 trained, 7 filtered, 3 expired, 0 failed, 0 in flight",
    ):
        assert part in text
    assert "cause" not in text
    assert "generated again" not in text


def test_a_resumed_run_shows_how_many_steps_its_time_covers() -> None:
    assert "80 steps, 30 of them in 140.5 s" in closing({**SUMMARY, "steps_before": 50})[0]


def test_closing_counts_groups_that_were_generated_again() -> None:
    assert any(
        "in flight; 4 generated again" in line for line in closing({**SUMMARY, "groups_regenerated": 4})
    )


def test_closing_lines_of_a_run_that_failed_before_step_one() -> None:
    lines = closing(
        {**SUMMARY, "status": "failed", "reward_first": None, "reward_last": None, "error": "E: boom"}
    )
    assert not any("reward" in line for line in lines)
    assert not any("cause" in line for line in lines), "it is the last line of the run"


def test_closing_names_steps_that_did_not_train_and_checkpoints_that_are_missing() -> None:
    found = {"updates_skipped": 3, "checkpoints_failed": 2, "checkpoint_last": 40}
    text = "\n".join(closing({**SUMMARY, **found}))
    assert "3 of the steps did not train" in text
    assert "2 checkpoints could not be written; the last complete one is of step 40" in text
    none = "\n".join(closing({**SUMMARY, **dict.fromkeys(found, 0)}))
    assert "did not train" not in none and "checkpoint" not in none


def test_closing_names_what_was_switched_off_and_omits_its_figures() -> None:
    off = {"the overlap meter": "ValueError: x"}
    text = "\n".join(
        closing(
            {**SUMMARY, "overlap_s": None, "observers_off": off, "observers_failing": {"a writer": "OSError"}}
        )
    )
    assert "switched off after an error: the overlap meter (ValueError: x)" in text
    assert "failing at the end: a writer (OSError)" in text
    assert "overlapped" not in text
