# SPDX-License-Identifier: Apache-2.0
"""Run directories are read as far as possible, with a message for each missing file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from recipe.async_pipeline.errors import RunFilesError
from recipe.async_pipeline.tools.report.figures import run_reader
from recipe.async_pipeline.tools.report.figures.data import data_of
from recipe.async_pipeline.tools.report.figures.run_reader import read_run
from recipe.async_pipeline.verl_bridge.rollout.vllm.facts import engine_line
from tests.observe.run_folder import RecordedTrainer, write_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", RecordedTrainer(max_lag=1, steps=6))


def test_a_complete_run_has_no_missing_files(folder: Path) -> None:
    found = read_run(folder)
    assert found.missing == ()
    assert [row.step for row in found.steps] == [1, 2, 3, 4, 5, 6]
    assert found.summary["steps"] == 6
    assert found.events[0].event == "START"


def test_the_engine_is_the_one_that_the_run_printed(folder: Path) -> None:
    assert read_run(folder).engine == ""
    facts = {"model runner": "V2 (a.Runner)", "attention": "CPU_ATTN"}
    (folder / "run.log").write_text(f"first\n(Server pid=1) {engine_line('0.28.0', facts)}\nlast\n")
    assert read_run(folder).engine == "vLLM 0.28.0, model runner V2 (a.Runner), attention CPU_ATTN"


def test_of_large_files_of_a_live_run_a_part_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "summary.json").unlink()
    whole = read_run(folder, live=True)
    assert whole.missing == () and whole == replace(read_run(folder), missing=())
    monkeypatch.setattr(run_reader, "LIVE_BYTES", 1000)
    monkeypatch.setattr(run_reader, "SAMPLED", 2)
    monkeypatch.setattr(run_reader, "TAIL_BYTES", len(lines_of(folder / "metrics.jsonl")[-1]) + 1)
    monkeypatch.setattr(run_reader, "EVENTS_BYTES", (folder / "events.jsonl").stat().st_size // 2)
    found = read_run(folder, live=True)
    assert len(found.steps) == 3 and [found.steps[0].step, found.steps[-1].step] == [1, 6]
    (missing,) = found.missing
    assert "weight updates are the ones since step 3, from 0 s on" in missing
    assert [one.fields["step"] for one in found.events if one.event == "TRAINED"] == [3, 4, 5, 6]
    assert found.events[0].event == "START" and found.events[1].t == 0.0
    data = data_of(found)
    assert data.accounting is not None and [one.step for one in data.accounting.steps] == [3, 4, 5, 6]


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines()


@pytest.mark.parametrize("name", ["events.jsonl", "metrics.jsonl", "summary.json", "config.json"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    missing = read_run(folder).missing
    assert len(missing) == 1
    assert missing[0].startswith(name)


@pytest.mark.parametrize(
    ("loggers", "remedy"),
    [(["console"], "set the tracker `file` to write it"), (["file"], "no step was finished")],
)
def test_metrics_of_no_step_are_no_fault_of_the_tracker(
    folder: Path, loggers: list[str], remedy: str
) -> None:
    (folder / "metrics.jsonl").unlink()
    (folder / "config.json").write_text(json.dumps({"trainer": {"logger": loggers}}))
    (missing,) = read_run(folder).missing
    assert missing.endswith(f"; {remedy}")


@pytest.mark.parametrize("name", ["summary.json", "config.json"])
def test_an_incomplete_json_file_is_named(folder: Path, name: str) -> None:
    (folder / name).write_text('{"steps": ')
    assert [text.split(" ")[0] for text in read_run(folder).missing] == [name]


def test_incomplete_lines_of_metrics_are_counted_and_skipped(folder: Path) -> None:
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 7, "da')
    found = read_run(folder)
    assert len(found.steps) == 6
    assert found.missing == ("metrics.jsonl: 1 of 7 lines are incomplete and skipped",)


def test_an_incomplete_event_is_skipped_at_the_end_and_named_elsewhere(folder: Path) -> None:
    path = folder / "events.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines)[:-5])
    assert len(read_run(folder).events) == len(lines) - 1
    path.write_text("\n".join([*lines[:5], '{"t":', *lines[5:]]))
    assert read_run(folder).missing[0].startswith("events.jsonl cannot be read (JSONDecodeError")


def test_events_without_stages_and_pools_are_of_an_older_version(folder: Path) -> None:
    (folder / "events.jsonl").write_text('{"t": 0.0, "role": "flow", "event": "START", "state": "RUNNING"}\n')
    found = read_run(folder)
    assert found.events == ()
    assert "older version" in found.missing[0]


def test_validations_are_separate_and_have_their_version(folder: Path) -> None:
    path = folder / "metrics.jsonl"
    row = {"step": 6, "data": {"async_pipeline/validation/version": 3, "val-core/toy/reward": 0.5}}
    path.write_text(path.read_text() + json.dumps(row) + "\n")
    found = read_run(folder)
    assert len(found.steps) == 6
    assert [row.step for row in found.validations] == [3]


def test_a_path_without_a_run_is_an_error_of_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        RunFilesError, match=r"nowhere is not a run directory; give the directory with events\.jsonl"
    ):
        read_run(tmp_path / "nowhere")
    with pytest.raises(RunFilesError, match="has neither events nor metrics of a run") as caught:
        read_run(tmp_path)
    assert "\n" not in str(caught.value)
    (tmp_path / "summary.json").write_text('{"status": "failed", "error": "ValueError: mine"}')
    with pytest.raises(RunFilesError, match=r"it ended \(failed\) before it began: ValueError: mine$"):
        read_run(tmp_path)


def test_a_resumed_run_names_the_processes_without_events(folder: Path) -> None:
    (folder / "events.1.jsonl").write_text("")
    assert read_run(folder).missing == (
        "the run was resumed: the report shows the metrics of all processes, but only the events of the last "
        "one that trained, events.jsonl, and not events.1.jsonl",
    )


def test_a_process_without_a_step_does_not_hide_the_events_of_the_one_before(folder: Path) -> None:
    """Such as the one that a batch system starts again after the last step."""
    whole = read_run(folder).events
    (folder / "events.jsonl").rename(folder / "events.1.jsonl")
    first, *_ = (folder / "events.1.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "events.jsonl").write_text(first, encoding="utf-8")
    found = read_run(folder)
    assert found.events == whole
    assert found.missing[0].endswith("the last one that trained, events.1.jsonl, and not events.jsonl")
