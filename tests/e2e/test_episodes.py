# SPDX-License-Identifier: Apache-2.0
"""Episodes that fail cost an attempt each and nothing else, and their ends are counted."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from recipe.async_pipeline.gateway.client import GatewayError, claim, claimed
from recipe.async_pipeline.lab.soak import lake_agent
from recipe.async_pipeline.tools.ledger.file import audit_file
from tests.e2e.environments import KINDS
from tests.e2e.job import LOOK, check_clean_end, check_events, processes_of, run_job, smoke_command

pytestmark = pytest.mark.e2e
AGENTIC = "trainer.v1.async_pipeline.agentic"


def of_size(boards: int, episodes: int) -> list[str]:
    """Return the overrides of a step of so many boards with so many episodes each."""
    batch = boards * episodes
    return [
        f"data.train_batch_size={boards}",
        f"actor_rollout_ref.rollout.n={episodes}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={boards}",
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={batch}",
        f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={batch}",
        f"actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu={batch}",
    ]


def test_environments_that_fail_cost_one_attempt_each(untrained_lake_task: Path, tmp_path: Path) -> None:
    marks, run_dir = tmp_path / "marks", tmp_path / "run"
    steps, boards, episodes = 2, 4, 4
    marks.mkdir()
    job = run_job(
        smoke_command(
            "+task=lake",
            "async_strategy=fully_async",
            f"trainer.total_training_steps={steps}",
            "trainer.val_before_train=false",
            "trainer.test_freq=-1",
            f"trainer.v1.async_pipeline.run_dir={run_dir}",
            f"{AGENTIC}.environment=tests.e2e.environments:FailingLake",
            f"+{AGENTIC}.environment_kwargs.marks={marks}",
            f"{AGENTIC}.isolation=process",
            # Each of them is a process that imports gymnasium.
            f"{AGENTIC}.concurrency=6",
            # Eight boards in the order of their seeds have each kind of failure.
            "data.shuffle=false",
            *of_size(boards, episodes),
        ),
        run_dir,
        untrained_lake_task,
    )
    summary = check_clean_end(job, "fully_async", 3, steps, groups=boards, responses=episodes)
    check_events(job)
    assert processes_of(run_dir) == [], "no environment is left"

    failed = Counter(mark.name.partition("-")[0] for mark in marks.iterdir())
    assert set(failed) == set(KINDS), "each kind of failure happened"
    audited = audit_file(run_dir)
    assert (audited.status, audited.violations) == ("completed", [])
    assert audited.episodes_repeated == failed.total(), "each failure cost one attempt"
    assert summary["groups_failed"] == 0, "and no group"
    drift = [row["data"]["async_pipeline/drift/max"] for row in job.metrics() if _compared(row)]
    assert drift and max(drift) < 1e-4, "the trainer sees the tokens that the engine wrote, in every turn"
    ended = sum(row["data"].get("async_pipeline/agentic/again", 0) for row in job.metrics())
    assert 0 < ended <= failed.total()


@pytest.mark.nightly
def test_runners_outside_of_the_run_play_its_episodes(lake_task: Path, tmp_path: Path) -> None:
    """A runner claims an episode and vanishes; the episode gets a second attempt."""
    folder, run_dir, steps, boards, episodes = tmp_path / "runners", tmp_path / "run", 2, 4, 2
    ended = threading.Event()
    runners = [threading.Thread(target=play_episodes, args=(folder, ended, i == 0)) for i in range(3)]
    for runner in runners:
        runner.start()
    try:
        job = run_job(
            smoke_command(
                "+task=lake_agent",
                "async_strategy=one_step_off",
                f"trainer.total_training_steps={steps}",
                "trainer.val_before_train=false",
                "trainer.test_freq=-1",
                f"trainer.v1.async_pipeline.run_dir={run_dir}",
                f"{AGENTIC}.agent=external",
                f"{AGENTIC}.gateway.runners_dir={folder}",
                f"{AGENTIC}.gateway.lease_s=20",
                *of_size(boards, episodes),
            ),
            run_dir,
            lake_task,
        )
    finally:
        ended.set()
        for runner in runners:
            runner.join()
    assert job.status == 0, job.output[-3000:]
    assert list(folder.iterdir()) == [], "runners of a later run find its gateways only"

    audited = audit_file(run_dir)
    assert (audited.status, audited.violations) == ("completed", [])
    assert audited.episodes_repeated == 1
    found = [row["data"]["async_pipeline/agentic/success"] for row in job.metrics()]
    assert len(found) == steps and sum(found) > 0, "their rewards are trained"


@pytest.mark.nightly
@pytest.mark.parametrize(("engine", "played"), [("vllm", "agent"), ("sglang", "loop")])
def test_the_policy_sees_an_environment(look_task: Path, tmp_path: Path, engine: str, played: str) -> None:
    """The board is drawn: a prompt and each of its turns has a picture, which an agent sends over HTTP."""
    playing = {
        "loop": [
            "actor_rollout_ref.rollout.agent.default_agent_loop=environment",
            f"{AGENTIC}.environment=frozen_lake",
            f"+{AGENTIC}.environment_kwargs={{size: 3, pictures: true, invalid: continue}}",
        ],
        "agent": [
            "data.image_key=none",
            "actor_rollout_ref.rollout.agent.default_agent_loop=agent_session",
            f"{AGENTIC}.agent=tests.e2e.environments:play_seeing",
        ],
    }
    run_dir, steps, boards, episodes = tmp_path / "run", 3, 4, 4
    job = run_job(
        smoke_command(
            *LOOK,
            "async_strategy=one_step_off",
            f"actor_rollout_ref.rollout.name={engine}",
            *playing[played],
            f"{AGENTIC}.max_turns=3",
            "data.max_prompt_length=32",
            "data.max_response_length=80",
            "actor_rollout_ref.rollout.max_model_len=112",
            "reward.custom_reward_function.path=null",
            f"trainer.total_training_steps={steps}",
            f"trainer.v1.async_pipeline.run_dir={run_dir}",
            *of_size(boards, episodes),
        ),
        run_dir,
        look_task,
    )
    check_clean_end(job, "one_step_off", 1, steps, groups=boards, responses=episodes)
    check_events(job)
    drift = [row["data"]["async_pipeline/drift/max"] for row in job.metrics() if _compared(row)]
    # An engine never writes placeholders, so its log-probs are a little larger; with other pictures or tokens
    # they differ by more than 1.
    assert drift and max(drift) < 0.05, "the trainer sees the pictures that the engine saw, in every turn"
    assert all(row["data"]["num_turns/max"] == 6 for row in job.metrics())


def play_episodes(folder: Path, ended: threading.Event, forgets: bool) -> None:
    """Play episodes until the run has ended. `forgets`: but not the first one, whose lease expires."""
    while not ended.is_set():
        with suppress(OSError, GatewayError):
            if forgets:
                forgets = claim(folder, 1.0) is None
                continue
            with claimed(folder, 1.0) as task:
                if task is None:
                    continue
                policy = lake_agent.PolicyChat(task.base_url, task.api_key)
                task.reward = lake_agent.play(task.shown, policy, Path("no control file"), is_bad=False)


def _compared(row: Mapping[str, Any]) -> bool:
    return "async_pipeline/drift/max" in row["data"]
