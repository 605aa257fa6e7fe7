# SPDX-License-Identifier: Apache-2.0
"""Whole jobs with SGLang's real engine: they train as with vLLM, and survive the death of its processes."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from functools import partial
from pathlib import Path

import pytest

from recipe.async_pipeline.tools.ledger.file import audit_file
from tests.e2e.job import (
    LOOK,
    Event,
    Job,
    check_clean_end,
    check_events,
    interrupt,
    kill_all,
    pids_named,
    run_job,
    signal_one_of_two,
    smoke_command,
)
from tests.fakes.waiting import until

pytestmark = pytest.mark.e2e
SGLANG = "actor_rollout_ref.rollout.name=sglang"
KL_MAX = 0.005
"""Of one policy between the trainer's log-probs and the engine's."""
GAIN = 0.15
LAGS = {"on_policy": 0, "fully_async": 3}
TWO_RANKS = (
    "actor_rollout_ref.rollout.n_gpus_per_node=2",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    "ray_kwargs.ray_init.num_gpus=3",
)
"""Of one replica."""
BACK = "serves again, version "
WAITS_S = 1.0
"""By then a gathered version is prepared, and a replica whose scheduler is stopped waits for its load."""


def train(task: Path, folder: Path, strategy: str, steps: int, *overrides: str) -> Job:
    lag = LAGS[strategy]
    more = [f"trainer.v1.async_pipeline.staleness.max_lag={lag}"] if lag > 1 else []
    command = smoke_command(
        SGLANG,
        f"async_strategy={strategy}",
        f"trainer.total_training_steps={steps}",
        f"trainer.v1.async_pipeline.run_dir={folder}",
        *more,
        *overrides,
    )
    return run_job(command, folder, task)


def test_sglang_trains_a_vision_language_model(look_task: Path, tmp_path: Path) -> None:
    """Its engine sees what the trainer sees: an error in a picture would show in the log-probs."""
    job = train(look_task, tmp_path / "run", "on_policy", 3, *LOOK)
    summary = check_clean_end(job, "on_policy", 0, 3)
    check_events(job)
    assert summary["rollout_corr_kl_max"] <= KL_MAX


@pytest.mark.nightly
def test_two_ranks_serve_one_replica(tied_task: Path, tmp_path: Path) -> None:
    job = train(tied_task, tmp_path / "run", "on_policy", 5, *TWO_RANKS)
    summary = check_clean_end(job, "on_policy", 0, 5)
    check_events(job)
    assert summary["rollout_corr_kl_max"] <= KL_MAX


@pytest.mark.nightly
def test_lora_adapters_are_trained_and_served_by_two_ranks(tied_task: Path, tmp_path: Path) -> None:
    adapters = ("actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.rollout.load_format=auto")
    job = train(tied_task, tmp_path / "run", "on_policy", 5, *adapters, *TWO_RANKS)
    summary = check_clean_end(job, "on_policy", 0, 5)
    check_events(job)
    assert summary["rollout_corr_kl_max"] <= KL_MAX


@pytest.mark.nightly
def test_the_reward_grows_at_a_lag_of_three(tied_task: Path, tmp_path: Path) -> None:
    job = train(tied_task, tmp_path / "run", "fully_async", 60)
    summary = check_clean_end(job, "fully_async", LAGS["fully_async"], 60)
    check_events(job)
    assert summary["reward_last"] - summary["reward_first"] >= GAIN


def gathered(run_dir: Path) -> int:
    """Return the number of versions that were gathered so far."""
    return (run_dir / "events.jsonl").read_text(encoding="utf-8").count('"GATHERED"')


@pytest.mark.nightly
def test_replicas_that_die_or_hang_come_back(tied_task: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    signal_one = partial(signal_one_of_two, "sglang::scheduler", run_dir)

    def kill_while_loading(process: subprocess.Popen[str]) -> None:
        """Stop a scheduler, and kill it when its replica waits for it to load the next version."""
        stopped = pids_named("sglang::scheduler", run_dir)[0]
        signal_one(signal.SIGSTOP)(process)
        before = gathered(run_dir)
        until(lambda: gathered(run_dir) > before, "another version")
        threading.Timer(WAITS_S, os.kill, (stopped, signal.SIGKILL)).start()

    command = smoke_command(
        SGLANG,
        "async_strategy=fully_async",
        "trainer.total_training_steps=1000",
        "actor_rollout_ref.rollout.n_gpus_per_node=2",
        "ray_kwargs.ray_init.num_gpus=3",
        "trainer.v1.async_pipeline.weight_sync.timeout_s=20",
        f"trainer.v1.async_pipeline.run_dir={run_dir}",
    )
    events = [
        Event(" 4/1000", signal_one(signal.SIGKILL)),
        Event(BACK, signal_one(signal.SIGSTOP)),
        Event(BACK, kill_while_loading),
        Event(BACK, kill_all("PipelineSGLangServer", run_dir)),
        Event(BACK),
        Event(BACK, interrupt),
    ]
    job = run_job(command, run_dir, tied_task, events=events)
    assert job.summary["status"] == "interrupted", job.output[-3000:]
    assert audit_file(run_dir).violations == []
    found = [event["event"] for event in job.events()]
    assert found.count("FENCED") == found.count("REJOINED") == 5
