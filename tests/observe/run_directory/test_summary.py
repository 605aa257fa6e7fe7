# SPDX-License-Identifier: Apache-2.0
"""The summary of complete and incomplete runs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from recipe.async_pipeline.core.flow import FlowResult
from recipe.async_pipeline.core.groups.items import Publication
from recipe.async_pipeline.core.schedule import Schedule
from recipe.async_pipeline.core.waits.retry import CheckpointTimes
from recipe.async_pipeline.observe.observers import Observers
from recipe.async_pipeline.observe.run_directory.summary import RunRecorder, side_effects, write_atomically


def publication(version: int, load_s: float) -> Publication:
    return Publication(
        version=version,
        num_bytes=8,
        gather_s=0.5,
        transfer_s=0.1,
        load_s=load_s,
        stall_s=load_s / 2,
        busy_s=load_s * 3,
        tensors_proved=3,
        elements_served=8,
        elements_explained=8 - version,
        replicas=1,
    )


def result(*publications: Publication, steps: int = 0) -> FlowResult:
    return FlowResult(
        steps=steps,
        groups_drawn=steps,
        groups_trained=steps,
        groups_filtered=2,
        groups_expired=1,
        groups_failed=4,
        groups_in_flight=0,
        regenerated=3,
        trajectories_trained=4 * steps,
        lag_max=1,
        trainer_version=steps,
        served_version=steps,
        weight_updates=len(publications),
        tensors_proved=sum(one.tensors_proved for one in publications),
        updates_skipped=2,
        publications=publications,
    )


def recorder(rewards: list[float]) -> RunRecorder:
    made = RunRecorder(strategy="one_step_off", max_lag=1, started_unix=1000.0)
    for i, reward in enumerate(rewards):
        made.record(reward, step_s=9.0 if i == 0 else 2.0, kl=(-1) ** i * i / 1000, now_unix=1050.0 + 2 * i)
    return made


def test_rewards_are_means_of_the_first_and_last_fifth() -> None:
    rewards = [0.0, 0.2, *[0.5] * 6, 0.8, 1.0]
    summary = recorder(rewards).summarize(result(steps=10), overlap_s=1.23456, now_unix=1070.0)
    assert (summary["reward_first"], summary["reward_last"]) == (0.1, 0.9)


@pytest.mark.parametrize("count", [1, 4, 9])
def test_a_fifth_is_at_least_one_step(count: int) -> None:
    summary = recorder([float(i) for i in range(count)]).summarize(result(steps=count), 0.0, 1070.0)
    assert (summary["reward_first"], summary["reward_last"]) == (0.0, count - 1.0)


def test_all_figures_of_a_completed_run() -> None:
    publications = (publication(0, 3.0), publication(1, 0.25), publication(2, 0.5))
    summary = recorder([0.5, 0.5]).summarize(result(*publications, steps=2), 1.23456, 1070.0)
    assert summary == {
        "status": "completed",
        "error": None,
        "strategy": "one_step_off",
        "max_lag": 1,
        "steps": 2,
        "steps_before": 0,
        "samples_trained": 8,
        "groups_drawn": 2,
        "groups_trained": 2,
        "groups_filtered": 2,
        "groups_expired": 1,
        "groups_failed": 4,
        "groups_in_flight": 0,
        "groups_regenerated": 3,
        "updates_skipped": 2,
        "reward_first": 0.5,
        "reward_last": 0.5,
        "lag_max": 1,
        "served_version": 2,
        "trainer_version": 2,
        "rollout_corr_kl_max": 0.001,
        "overlap_s": 1.235,
        "publications": 3,
        "gather_s_median": 0.5,
        "load_s_median": 0.5,
        "stall_s_median": 0.25,
        "tensors_proved": 9,
        "explained_share": 0.75,
        "step_s_median": 2.0,
        "train_s": 1070.0 - 1050.0 + 9.0,
        "time_to_first_step_s": 50.0,
        "wall_s": 70.0,
    }


def test_the_largest_kl_is_absolute_and_may_be_missing() -> None:
    made = recorder([0.0] * 4)
    assert made.summarize(result(), 0.0, 0.0)["rollout_corr_kl_max"] == 0.003
    made.kls.append(-0.5)
    assert made.summarize(result(), 0.0, 0.0)["rollout_corr_kl_max"] == 0.5
    without_kl = RunRecorder(strategy="on_policy", max_lag=0, started_unix=0.0)
    without_kl.record(0.5, 1.0, None, 1.0)
    assert without_kl.summarize(result(), 0.0, 2.0)["rollout_corr_kl_max"] is None


@pytest.mark.parametrize("error", [asyncio.CancelledError(), KeyboardInterrupt()])
def test_ctrl_c_is_an_interruption(error: BaseException) -> None:
    summary = recorder([]).summarize(result(), 0.0, 1007.0, error)
    assert (summary["status"], summary["error"]) == ("interrupted", None)


def test_a_run_that_fails_before_its_first_step_has_a_summary() -> None:
    summary = recorder([]).summarize(result(), 0.0, 1007.0, ValueError("no data"))
    assert summary["status"] == "failed"
    assert summary["error"] == "ValueError: no data"

    empty = (
        "reward_first",
        "reward_last",
        "rollout_corr_kl_max",
        "gather_s_median",
        "load_s_median",
        "stall_s_median",
        "step_s_median",
    )
    assert [summary[name] for name in (*empty, "time_to_first_step_s")] == [None] * (len(empty) + 1)
    assert (summary["train_s"], summary["wall_s"]) == (0.0, 7.0)
    json.dumps(summary)


def test_what_failed_besides_the_training_is_named() -> None:
    observers = Observers(print)
    assert side_effects(observers, None) == {}
    made = CheckpointTimes(Schedule(batch=1, last_step=100, save_every=10))
    assert side_effects(observers, made) == {"checkpoint_last": 0, "checkpoints_failed": 0}
    made.succeeded(10)
    made.failed(20, 20, 0.0)
    observers.failed("the tracker wandb", ConnectionError("503"), lost="")
    observers.value("a writer", Path("/none").stat, lost="", attempts=2)
    assert side_effects(observers, made) == {
        "observers_off": {"the tracker wandb": "ConnectionError: 503"},
        "observers_failing": {"a writer": "FileNotFoundError: [Errno 2] No such file or directory: '/none'"},
        "checkpoint_last": 10,
        "checkpoints_failed": 1,
    }


# The file.


def test_write_atomically_leaves_the_old_or_the_new_file(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_atomically(path, {"steps": 1})
    with pytest.raises(TypeError):
        write_atomically(path, {"steps": object()})
    assert json.loads(path.read_text(encoding="utf-8")) == {"steps": 1}
    write_atomically(path, {"steps": 2})
    assert json.loads(path.read_text(encoding="utf-8")) == {"steps": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"], "no partial file remains"


def test_unknown_converts_values_that_json_cannot_represent(tmp_path: Path) -> None:
    write_atomically(tmp_path / "config.json", {"at": Path("a")}, unknown=str)
    assert json.loads((tmp_path / "config.json").read_text(encoding="utf-8")) == {"at": "a"}
