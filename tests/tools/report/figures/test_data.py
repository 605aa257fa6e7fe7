# SPDX-License-Identifier: Apache-2.0
"""The numbers of a report match the run's files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from recipe.async_pipeline.observe.observers import ACCOUNT
from recipe.async_pipeline.tools.report.figures.data import RunData, changed_settings, data_of
from recipe.async_pipeline.tools.report.figures.run_reader import read_run
from tests.observe.run_folder import RecordedTrainer, write_run

STEPS, GROUPS, N = 10, 4, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    trainer = RecordedTrainer(
        max_lag=2, steps=STEPS, groups=GROUPS, n=N, order="finished", filtered=lambda uid: uid.endswith(".3")
    )
    return write_run(tmp_path_factory.mktemp("runs") / "run", trainer, strategy="fully_async")


@pytest.fixture(scope="module")
def run(folder: Path) -> RunData:
    return data_of(read_run(folder))


def test_figures_come_from_summary_and_steps(run: RunData) -> None:
    assert run.name.endswith("/run")
    assert (run.status, run.strategy, run.max_lag, run.steps) == ("completed", "fully_async", 2, STEPS)
    assert len(run.step_s) == len(run.reward.x) == len(run.length_mean.x) == STEPS
    assert run.samples_per_s == pytest.approx((STEPS - 1) * GROUPS * N / sum(run.step_s[1:]))
    assert sum(run.lag_share.values()) == pytest.approx(1.0)
    assert run.fates["trained"] == STEPS * GROUPS
    assert run.fates["filtered"] > 0


def test_activities_of_pools_cover_the_run_without_gaps(run: RunData) -> None:
    assert run.accounting is not None
    end = run.accounting.wall_s - 30.0
    for spans in run.pools.values():
        assert spans[0][0] == 0.0
        assert spans[-1][1] == pytest.approx(end)
        assert all(a[1] == b[0] and a[2] != b[2] for a, b in zip(spans, spans[1:], strict=False))


def test_spans_and_account_agree_on_the_training_pool(run: RunData) -> None:
    assert run.accounting is not None
    shown = sum(b - a for a, b, what in run.pools["train"] if what == "compute_train")
    pool = run.accounting.pools["train"]
    assert shown * pool.devices == pytest.approx(pool.seconds["compute_train"])


def test_weight_updates_queues_and_steps_come_from_events(run: RunData) -> None:
    assert [p.version for p in run.publications] == list(range(STEPS + 1))
    assert all(p.num_bytes == 1_200_000_000 and p.transfer_s > p.stall_s for p in run.publications)
    assert list(run.step_ends) == list(range(1, STEPS + 1))
    assert max(run.queues["answering"].y) <= GROUPS * 3
    assert all(series.y[-1] == 0 for series in run.queues.values())


def test_validations_are_indexed_by_version(folder: Path, tmp_path: Path) -> None:
    rows = (folder / "metrics.jsonl").read_text()
    for version, value in ((0, 0.1), (5, 0.4)):
        rows += (
            json.dumps(
                {
                    "step": 9,
                    "data": {
                        "async_pipeline/validation/version": version,
                        "val-core/toy/reward/mean@1": value,
                    },
                }
            )
            + "\n"
        )

    (tmp_path / "metrics.jsonl").write_text(rows)
    found = data_of(read_run(tmp_path))
    assert {name: (list(s.x), list(s.y)) for name, s in found.validation.items()} == {
        "val-core/toy/reward/mean@1": ([0, 5], [0.1, 0.4])
    }
    assert found.accounting is None, "there are no events"
    assert found.status == "unfinished"


def test_a_run_without_metrics_has_its_account(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text((folder / "events.jsonl").read_text())
    found = data_of(read_run(tmp_path))
    assert found.accounting is not None
    assert (found.steps, found.max_lag, found.samples_per_s) == (STEPS, 2, None)
    assert not found.reward
    assert found.fates["filtered"] > 0


def test_events_of_another_version_are_skipped_with_a_message(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text((folder / "metrics.jsonl").read_text())
    (tmp_path / "events.jsonl").write_text(
        (folder / "events.jsonl").read_text().replace('"replicas"', '"copies"')
    )
    found = data_of(read_run(tmp_path))
    assert any(text.startswith("events.jsonl is invalid (KeyError: 'replicas')") for text in found.missing)
    assert found.accounting is None
    assert len(found.reward.x) == STEPS


def test_changed_settings_exclude_names_and_paths() -> None:
    a = {
        "trainer": {"v1": {"max_lag": 1, "run_dir": "a"}, "experiment_name": "a"},
        "data": {"train_files": "a", "shuffle": True},
        "lr": 1e-6,
    }
    b = {
        "trainer": {"v1": {"max_lag": 3, "run_dir": "b", "depth": 2}, "experiment_name": "b"},
        "data": {"train_files": "b", "shuffle": True},
        "lr": 1e-6,
    }
    assert changed_settings(a, b) == [("trainer.v1.max_lag", "1", "3"), ("trainer.v1.depth", "not set", "2")]
    assert changed_settings(a, a) == []


def test_a_cold_start_does_not_change_the_typical_account(folder: Path, run: RunData, tmp_path: Path) -> None:
    """Shift everything after the first served version by 1,000 s."""
    assert run.warm is not None and run.accounting is not None
    assert run.warm.steady_s < run.accounting.steady_s
    assert len(run.warm.steps) == STEPS - 1

    events = (folder / "events.jsonl").read_text().splitlines()
    cold, begun = [], False
    for line in events:
        record = json.loads(line)
        if begun:
            record["t"] += 1000.0
            if record["event"] == "TRAINED" and record["step"] <= 3:
                record["batch/tail_s"] = record.get("batch/tail_s", 0.0) + 1000.0
        begun = begun or record["event"] == "SERVED"
        cold.append(json.dumps(record))
    (tmp_path / "events.jsonl").write_text("\n".join(cold) + "\n")
    for name in ("summary.json", "metrics.jsonl", "config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())

    found = data_of(read_run(tmp_path))
    assert found.accounting is not None and found.typical is not None and run.typical is not None
    assert found.accounting.steady_s == pytest.approx(run.accounting.steady_s + 1000.0)
    assert found.typical.bubble_ratio == pytest.approx(run.typical.bubble_ratio, abs=0.02)
    assert found.typical.loop_s == pytest.approx(run.typical.loop_s, rel=0.2)


@pytest.mark.parametrize("name", [ACCOUNT, "events.jsonl"])
def test_a_run_that_switched_its_account_off_has_no_account(folder: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(folder, tmp_path / "run")
    path = tmp_path / "run" / "summary.json"
    summary = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(summary | {"observers_off": {name: "OSError: disk full"}}))
    found = data_of(read_run(tmp_path / "run"))
    assert found.accounting is None
    assert f"the run switched off {name} after an error (OSError: disk full)" in found.missing
