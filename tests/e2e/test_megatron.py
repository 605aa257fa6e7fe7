# SPDX-License-Identifier: Apache-2.0
"""Whole jobs that train with Megatron: parallel ranks, all strategies, pools, and a resume."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from recipe.async_pipeline.tools.ledger.file import audit_file
from tests.e2e.job import (
    Event,
    Job,
    check_clean_end,
    check_events,
    check_reference_returned,
    kill_reference,
    processes_of,
    run_job,
    smoke_command,
)
from tests.e2e.resumes import command, ended_well, losses, weights
from tests.e2e.weights import assert_same_weights

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(find_spec("megatron") is None, reason="no megatron")]

MEGATRON = "training_engine=megatron"
SIZES = "actor_rollout_ref.actor.megatron"
TWO_RANKS = ("trainer.n_gpus_per_node=2", "ray_kwargs.ray_init.num_gpus=3")
KL_MAX = 0.005
"""Of one policy between the trainer's log-probs and the engine's."""
TOLERANCE = 1e-5
LAGS = {"on_policy": 0, "one_step_off": 1, "n_step_ahead": 3, "fully_async": 3}
"""Largest lag that a strategy permits here."""


def pools(*roles: str) -> tuple[str, ...]:
    """Return settings that give each of these stages one device to itself."""
    each = ",".join(f"{role}:{{roles:[{role}],devices:1}}" for role in roles)
    return (
        f"trainer.v1.async_pipeline.pools={{{each}}}",
        f"trainer.n_gpus_per_node={len(roles) - 1}",
        f"ray_kwargs.ray_init.num_gpus={len(roles)}",
    )


TENSOR_PARALLEL = (MEGATRON, *TWO_RANKS, f"{SIZES}.tensor_model_parallel_size=2")
EXPERT_PARALLEL = (MEGATRON, *TWO_RANKS, f"{SIZES}.expert_model_parallel_size=2")


def train(
    task: Path, folder: Path, strategy: str, steps: int, *overrides: str, events: Sequence[Event] = ()
) -> Job:
    lag = LAGS[strategy]
    more = [f"trainer.v1.async_pipeline.staleness.max_lag={lag}"] if lag > 1 else []
    command = smoke_command(
        f"async_strategy={strategy}",
        f"trainer.total_training_steps={steps}",
        f"trainer.v1.async_pipeline.run_dir={folder}",
        *more,
        *overrides,
    )
    return run_job(command, folder, task, events=events)


def check_trained(job: Job, strategy: str, steps: int) -> dict[str, Any]:
    """Whole jobs of every strategy end like this: trained and proved, with every prompt accounted for."""
    summary = check_clean_end(job, strategy, LAGS[strategy], steps)
    check_events(job)
    assert audit_file(job.run_dir).violations == []
    assert "weights are assembled" not in job.output, "each rank publishes what it holds"
    rows = [row["data"] for row in job.metrics() if "actor/pg_loss" in row["data"]]
    assert len(rows) == steps and all(row["actor/grad_norm"] > 0 for row in rows)
    if strategy == "on_policy":
        assert summary["rollout_corr_kl_max"] <= KL_MAX
    return summary


def test_parallel_ranks_publish_what_they_train(moe_task: Path, tmp_path: Path) -> None:
    job = train(moe_task, tmp_path / "run", "on_policy", 3, *EXPERT_PARALLEL)
    check_trained(job, "on_policy", 3)
    loads = [row["data"].get("actor/moe/busiest_expert") for row in job.metrics()]
    assert any(load is not None and load >= 1 for load in loads)


@pytest.mark.nightly
@pytest.mark.parametrize("own_pool", [False, True], ids=["shared", "own_pool"])
def test_recorded_routing_is_replayed(own_pool: bool, moe_task: Path, tmp_path: Path) -> None:
    """Each update has a second mini-batch, before which the routers have changed.

    The workers refuse an update without recorded routing.
    """
    steps = 2
    devices = pools("train", "logp", "generate") if own_pool else EXPERT_PARALLEL
    job = train(
        moe_task,
        tmp_path / "run",
        "one_step_off",
        steps,
        MEGATRON,
        f"{SIZES}.router_replay.mode=R2",
        "actor_rollout_ref.model.use_remove_padding=true",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32",
        *devices,
    )
    check_trained(job, "one_step_off", steps)
    # verl's own line, printed by each rank that replays.
    assert "routing replay layers: " in (job.run_dir / "run.log").read_text(encoding="utf-8")


@pytest.mark.nightly
def test_sglang_serves_what_megatron_trains(tied_task: Path, tmp_path: Path) -> None:
    sglang = "actor_rollout_ref.rollout.name=sglang"
    check_trained(train(tied_task, tmp_path / "run", "one_step_off", 6, MEGATRON, sglang), "one_step_off", 6)


def kill_rank(process: subprocess.Popen[str], run_dir: Path) -> None:
    """Kill one of the two training ranks, which ends the run."""
    ranks = [line for line in processes_of(run_dir) if "ray::WorkerDict" in line]
    assert len(ranks) == 2
    os.kill(int(ranks[0].partition(":")[0]), signal.SIGKILL)


@pytest.mark.nightly
def test_a_rank_is_killed_and_the_resumed_run_is_the_one_that_was_left_alone(
    tied_task: Path, tmp_path: Path
) -> None:
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    for folder in (alone, killed):
        folder.mkdir()
    # What an engine computes depends in its last bits on what else is in the batch.
    more = ("actor_rollout_ref.rollout.max_num_seqs=1", *TENSOR_PARALLEL)
    undisturbed = run_job(command(alone, "on_policy", "trainer.save_freq=6", *more), alone / "run", tied_task)
    ended_well(undisturbed)
    check_trained(undisturbed, "on_policy", 6)

    again = command(killed, "on_policy", "trainer.save_freq=2", *more)
    event = Event(" 5/6 ", lambda process: kill_rank(process, killed / "run"))
    first = run_job(again, killed / "run", tied_task, events=[event])
    assert first.status != 0 and " 5/6 " in first.output
    assert processes_of(killed / "run") == [], "megatron-core's checkpoints start a process for each rank"
    last = run_job(again, killed / "run", tied_task)
    ended_well(last)
    assert " resumed from " in last.output
    assert losses(last) == [pytest.approx(row, abs=TOLERANCE, rel=TOLERANCE) for row in losses(undisturbed)]
    assert_same_weights(weights(killed), weights(alone))


@pytest.mark.nightly
def test_log_probs_and_reference_on_their_own_devices(tied_task: Path, tmp_path: Path) -> None:
    """New workers get the refreshed reference, which memory no longer holds."""
    steps = 10
    job = train(
        tied_task,
        tmp_path / "run",
        "one_step_off",
        steps,
        MEGATRON,
        "actor_rollout_ref.actor.use_kl_loss=true",
        "trainer.v1.async_pipeline.training.ref_refresh_every=5",
        *pools("train", "logp", "ref_logp", "generate"),
        events=[Event(f" 7/{steps} ", kill_reference(tmp_path / "run"))],
    )
    check_clean_end(job, "one_step_off", LAGS["one_step_off"], steps)
    check_reference_returned(job)
    rows = [row["data"] for row in job.metrics() if "actor/pg_loss" in row["data"]]
    assert [row.get("async_pipeline/version/ref_logp") for row in rows] == [None] * 5 + [5] * 5
    # Right after a refresh, reference and policy are one.
    kls = [abs(row["actor/kl_loss"]) for row in rows]
    assert kls[0] < 1e-5 and kls[5] < 1e-5
    assert kls[4] > 1e-4 and kls[9] > 1e-4


@pytest.mark.nightly
def test_a_critic_learns_on_its_own_devices(tied_task: Path, tmp_path: Path) -> None:
    steps = 12
    job = train(
        tied_task,
        tmp_path / "run",
        "one_step_off",
        steps,
        MEGATRON,
        "algorithm.adv_estimator=gae",
        *pools("train", "critic", "generate"),
    )
    check_clean_end(job, "one_step_off", LAGS["one_step_off"], steps)
    check_events(job, "values", "critic")
    found = [row["data"]["critic/vf_loss"] for row in job.metrics() if "critic/vf_loss" in row["data"]]
    assert len(found) == steps
    assert min(found[-3:]) < 0.8 * found[0]
