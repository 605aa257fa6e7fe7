# SPDX-License-Identifier: Apache-2.0
"""Kill every process of a run, and resume it with the same command.

With answers that are seeded, nothing tells such a run from one that was left alone: neither its ledger nor
its weights.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import threading
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from recipe.async_pipeline.checkpoint.store import published
from recipe.async_pipeline.tools.ledger.file import audit_file
from tests.e2e.job import LOOK, Event, Job, run_job
from tests.e2e.job import kill_all as kill_processes
from tests.e2e.resumes import COMPARED, STEPS, command, ended_well, kill_all, losses, weights
from tests.e2e.weights import assert_equal_bits, assert_same_weights

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

TOLERANCE = 1e-5
KILLS = int(os.environ.get("ASYNC_PIPELINE_TEST_KILLS", "1"))
"""Of a run, each at a moment that no other run had; docs/results has runs with twenty."""
AFTER_S = 2.0
"""A kill comes up to so long after the line of output that announces it."""


def killed_at(step: int | None, run_dir: Path, delay_s: float, steps: int = STEPS) -> Event:
    """A moment after a step (None: any) was reported: in its checkpoint, in the publication, or in the
    next step.
    """

    def kill(process: subprocess.Popen[str]) -> None:
        threading.Timer(delay_s, kill_all, (process, run_dir)).start()

    return Event(f"{'' if step is None else f' {step}'}/{steps} ", kill)


def test_killed_and_resumed_with_pictures_is_the_run_that_was_left_alone(
    look_task: Path, tmp_path: Path
) -> None:
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    for folder in (alone, killed):
        folder.mkdir()
    # Weights of a correction would bring in the engine's log-probs, whose last bits depend on its batches.
    exact = ("algorithm.rollout_correction.rollout_is=null", *LOOK)
    undisturbed = run_job(
        command(alone, "on_policy", *exact, f"trainer.save_freq={STEPS}"), alone / "run", look_task
    )
    ended_well(undisturbed)

    again = command(killed, "on_policy", *exact, "trainer.save_freq=2")
    first = run_job(again, killed / "run", look_task, events=[killed_at(5, killed / "run", 0.3)])
    last = run_job(again, killed / "run", look_task)
    assert first.status != 0
    ended_well(last)
    assert " resumed from " in last.output
    assert audit_file(last.run_dir).processes >= 2

    assert losses(last) == [pytest.approx(row, abs=TOLERANCE, rel=TOLERANCE) for row in losses(undisturbed)]
    assert_same_weights(weights(killed), weights(alone))


def assert_kills_change_nothing(
    task: Path,
    folder: Path,
    *overrides: str,
    compared: Sequence[str] = COMPARED,
    groups: int = 16,
    events: Sequence[Event] = (),
) -> Job:
    """Compare a run that is killed at `KILLS` random moments with an undisturbed run, and return the latter.

    `groups`: of a step, as the overrides have it. `events`: before each kill.
    """
    steps = KILLS + 4
    delays_s = [random.uniform(0.0, AFTER_S) for _ in range(KILLS)]
    alone, killed = folder / "alone", folder / "killed"
    for one in (alone, killed):
        one.mkdir()
    # What an engine computes depends in its last bits on what else is in the batch. Over so many steps, one
    # of them would change a token sooner or later.
    overrides = ("actor_rollout_ref.rollout.max_num_seqs=1", *overrides)
    undisturbed = run_job(
        command(alone, "on_policy", f"trainer.save_freq={steps}", *overrides, steps=steps),
        alone / "run",
        task,
    )
    ended_well(undisturbed, steps, groups)

    again = command(
        killed,
        "on_policy",
        "trainer.save_freq=1",
        "trainer.max_actor_ckpt_to_keep=2",
        *overrides,
        steps=steps,
    )
    for delay_s in delays_s:
        killing = killed_at(None, killed / "run", delay_s, steps)
        job = run_job(again, killed / "run", task, events=[*events, killing])
        assert job.status != 0
    last = run_job(again, killed / "run", task)
    ended_well(last, steps, groups)
    assert losses(last, compared) == [
        pytest.approx(row, abs=10 * TOLERANCE, rel=TOLERANCE) for row in losses(undisturbed, compared)
    ], f"killed {delays_s} s after a step"
    assert_equal_bits(weights(killed, steps), weights(alone, steps))
    return undisturbed


KL_COEFFICIENT, REJECTED = "actor/reward_kl_penalty_coeff", "rollout_corr/rollout_rs_masked_fraction"


def test_killed_at_random_moments_with_rejected_tokens_and_an_adaptive_kl(
    tied_task: Path, tmp_path: Path
) -> None:
    """The reward stage of a later step, which rejects tokens and advances the coefficient, may run before a
    checkpoint is complete.
    """
    undisturbed = assert_kills_change_nothing(
        tied_task,
        tmp_path,
        # The replica's log-probs then differ from the trainer's by about a percent.
        "actor_rollout_ref.rollout.dtype=bfloat16",
        "algorithm.rollout_correction.rollout_rs=token_k1",
        "algorithm.rollout_correction.rollout_rs_threshold='0.98_1.02'",
        "algorithm.use_kl_in_reward=True",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.kl_coef=0.05",
        "algorithm.kl_ctrl.horizon=1000",
        "algorithm.kl_ctrl.target_kl=0.01",
        compared=(*COMPARED, KL_COEFFICIENT, REJECTED),
    )
    rows = losses(undisturbed, (KL_COEFFICIENT, REJECTED))
    assert len({row[KL_COEFFICIENT] for row in rows}) > len(rows) / 2, "the coefficient adapts"
    assert any(0 < row[REJECTED] < 1 for row in rows), "some tokens are rejected"


def test_killed_at_random_moments_with_a_teacher_that_died_before(
    untied_task: Path, untied_model: Path, tmp_path: Path
) -> None:
    assert_kills_change_nothing(
        untied_task,
        tmp_path,
        "distillation.enabled=true",
        f"distillation.teacher_models.teacher_model.model_path={untied_model / 'model'}",
        "distillation.teacher_models.teacher_model.inference.max_num_seqs=1",
        "distillation.distillation_loss.loss_mode=forward_kl_topk",
        "distillation.distillation_loss.topk=4",
        "ray_kwargs.ray_init.num_gpus=3",
        compared=(*COMPARED, "actor/distillation/loss"),
        events=[
            Event(" 1/", kill_processes("vLLMHttpServer", tmp_path / "killed" / "run")),
            Event(" reads again"),
        ],
    )


def test_killed_far_ahead_nothing_is_lost_and_a_damaged_checkpoint_is_passed_over(
    tied_task: Path, tmp_path: Path
) -> None:
    """Groups in flight, finished, and in batches of steps to come; some are filtered."""
    again = command(
        tmp_path,
        "fully_async",
        "trainer.v1.async_pipeline.staleness.max_lag=3",
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.metric=reward",
        "trainer.save_freq=1",
        "trainer.max_actor_ckpt_to_keep=2",
    )
    run_dir = tmp_path / "run"
    first = run_job(again, run_dir, tied_task, events=[killed_at(4, run_dir, 0.5)])
    assert first.status != 0
    newest, before = published(tmp_path / "checkpoints")[:2]
    with (newest / "pipeline.json").open("a") as file:
        file.write(" ")
    last = run_job(again, run_dir, tied_task)
    summary = ended_well(last)
    assert f"checkpoint refused: {newest} is damaged: pipeline.json has" in last.output
    assert f"resumed from {before}" in last.output
    assert summary["groups_filtered"] > 0
    assert [row["step"] for row in last.metrics() if "actor/pg_loss" in row["data"]] == list(
        range(1, STEPS + 1)
    )
    assert len(published(tmp_path / "checkpoints")) == 2


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_answers_that_were_being_written_continue_from_their_tokens(
    tied_task: Path, tmp_path: Path, engine: str
) -> None:
    again = command(
        tmp_path,
        "n_step_ahead",
        f"actor_rollout_ref.rollout.name={engine}",
        "trainer.v1.async_pipeline.staleness.max_lag=3",
        "trainer.save_freq=1",
        "data.max_response_length=48",
        "actor_rollout_ref.rollout.ignore_eos=true",
        # Most wait for others, so that many are half written at any moment.
        "actor_rollout_ref.rollout.max_num_seqs=32",
        # A seeded response begins again: an engine cannot continue its random numbers.
        seeded=False,
    )
    run_dir = tmp_path / "run"
    first = run_job(again, run_dir, tied_task, events=[killed_at(2, run_dir, 0.5)])
    assert first.status != 0
    last = run_job(again, run_dir, tied_task)
    ended_well(last)
    finished = assert_responses_continued(run_dir)
    assert all(one["tokens"] == 48 for one in finished), "none is shorter or longer"


def assert_responses_continued(run_dir: Path, loops: int = 1) -> list[dict[str, Any]]:
    """Check that responses begun before a kill were finished after it from their tokens, of each agent loop
    if the rows name them in turn. Returns responses of the groups that had such tokens.
    """
    records = [
        json.loads(line) for line in (run_dir / "ledger.jsonl").read_text().splitlines() if line.endswith("}")
    ]
    resumed = next(i for i, record in enumerate(records) if record["kind"] == "resumed")
    step = records[resumed]["step"]
    kept = {record["uid"]: record["kept_tokens"] for record in records[resumed:] if record["kind"] == "again"}
    drawn = [record["uid"] for record in records if record["kind"] == "dispatched"]
    found = []
    for loop in range(loops):
        wanted = {uid for uid in drawn[loop::loops] if kept.get(uid)}
        finished = [
            one
            for record in records[resumed:]
            if record["kind"] == "finished" and record["uid"] in wanted
            for one in record["trajectories"]
        ]
        # The version of the checkpoint may have been served before it was written, and is what the run
        # continues with: then two spans in a row have this version.
        written = [[version for version, _ in one["spans"]] for one in finished]
        assert any(
            versions[0] <= step < versions[-1] or any(a == b for a, b in pairwise(versions))
            for versions in written
        ), "begun before, finished after"
        found += finished
    return found


LOOPS = {"environment": "SeededEpisodes", "agent_session": "SeededSessions"}
"""The agent loops of this package, and what takes their names: the same with seeded answers."""


def with_both_loops(task: Path, made: Path) -> Path:
    """Return a copy of a task of which one row is played in an environment and the next one by a program."""
    shutil.copytree(task, made)
    rows = parquet.read_table(made / "train.parquet")
    names = [[*LOOPS][i % len(LOOPS)] for i in range(rows.num_rows)]
    parquet.write_table(rows.append_column("agent_name", [names]), made / "train.parquet")
    return made


def test_episodes_that_were_being_played_continue_from_their_turns(lake_task: Path, tmp_path: Path) -> None:
    """Killed while most episodes wait for their environment, with some turns written: the environment, or the
    program, plays them again, and the policy does not write them again.
    """
    batch = 4
    again = command(
        tmp_path,
        "fully_async",
        "+task=lake",
        "data.shuffle=false",
        "trainer.v1.async_pipeline.staleness.max_lag=3",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=1",
        f"data.train_batch_size={batch}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={batch}",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=32",
        "trainer.v1.async_pipeline.agentic.environment=tests.e2e.environments:SlowLake",
        "trainer.v1.async_pipeline.agentic.isolation=thread",
        "trainer.v1.async_pipeline.agentic.agent=tests.e2e.environments:play_slowly",
        "actor_rollout_ref.rollout.agent.default_agent_loop=environment",
        seeded=False,
    )
    run_dir, task = tmp_path / "run", with_both_loops(lake_task, tmp_path / "task")
    first = run_job(again, run_dir, task, events=[killed_at(2, run_dir, 0.5)])
    assert first.status != 0
    last = run_job(again, run_dir, task)
    ended_well(last, groups=batch)
    finished = assert_responses_continued(run_dir, loops=len(LOOPS))
    # A turn is a letter and its end token: with more, several turns were played.
    assert any(one["tokens"] > 2 for one in finished)
    replayed = "async_pipeline/agentic/replayed_requests"
    assert sum(row["data"].get(replayed, 0) for row in last.metrics()) > 0


def test_killed_at_random_moments_in_the_middle_of_episodes(lake_task: Path, tmp_path: Path) -> None:
    """An environment plays half of the boards and a program over HTTP the others; both begin again.

    A checkpoint of an on-policy run holds no token of the next step, so finished turns are generated again.
    """
    agents = tmp_path / "agents.json"
    named = [{"name": name, "_target_": f"tests.e2e.parts.{part}"} for name, part in LOOPS.items()]
    agents.write_text(json.dumps(named))
    assert_kills_change_nothing(
        with_both_loops(lake_task, tmp_path / "task"),
        tmp_path,
        "+task=lake",
        "trainer.v1.async_pipeline.agentic.agent=examples.lake_agent:play",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=32",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={agents}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=environment",
        groups=4,
    )
